"""Markdown as a page: what is in it stays text, and wide tables scroll by themselves."""

import pytest

from linvit.config import UserError
from linvit.page import page, write


def test_the_title_is_the_first_heading():
    assert "<title>Claims &amp; runs</title>" in page("Before.\n\n## Claims & runs\n\n# Later\n")
    assert "<title>linvit</title>" in page("No heading.")


def test_markup_within_the_text_is_shown():
    found = page("# <script>alert(1)</script>\n\n| a |\n|---|\n| <img src=x> |\n")
    assert "<script" not in found
    assert "<img" not in found
    assert "&lt;script&gt;alert(1)" in found
    assert "&lt;img src=x&gt;" in found


def test_a_table_scrolls_within_its_own_box():
    found = page("| a | b |\n|:---|---:|\n| x | 1 |\n")
    assert '<div class="table"><table>' in found
    assert found.count("</table></div>") == 1
    assert '<td style="text-align:right">1</td>' in found


def test_the_suffix_is_the_format(tmp_path):
    for name in ("a.md", "a.html"):
        write(tmp_path / name, "# A\n")
    assert (tmp_path / "a.md").read_text() == "# A\n"
    assert (tmp_path / "a.html").read_text() == page("# A\n")
    with pytest.raises(UserError, match=r"a\.rst: no format for suffix '\.rst'; allowed: \.md, \.html"):
        write(tmp_path / "a.rst", "# A\n")
