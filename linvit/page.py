"""Markdown as a page of its own, for a browser and for Snakemake's report: no script, nothing to fetch."""

import html
import re
from pathlib import Path

from markdown_it import MarkdownIt

from linvit.config import UserError
from linvit.files import write_text

STYLE = """
body { margin: 0 auto; max-width: 78rem; padding: 1rem 1.5rem; color: #262626; background: #fff;
       font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem } h2 { font-size: 1.2rem; margin-top: 2rem } h3 { font-size: 1rem }
p, ul { max-width: 50rem }
.table { overflow-x: auto }
table { border-collapse: collapse; font-size: 0.87rem; font-variant-numeric: tabular-nums }
th { border-bottom: 1px solid #262626; text-align: left; vertical-align: bottom }
td { border-bottom: 1px solid #e4e4e4; vertical-align: top }
th, td { padding: 0.25rem 0.7rem 0.25rem 0 }
td[style*="right"] { white-space: nowrap }
"""


def write(path: str | Path, markdown: str) -> None:
    """Write a text as it is (md) or as a page (html), by suffix.

    Raises:
        UserError: another suffix.
    """
    formats = {".md": lambda text: text, ".html": page}
    suffix = Path(path).suffix
    if suffix not in formats:
        raise UserError(f"{path}: no format for suffix {suffix!r}; allowed: {', '.join(formats)}")
    write_text(path, formats[suffix](markdown))


def page(markdown: str) -> str:
    """The whole page; its title is the first heading. HTML within the text is shown, not obeyed."""
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown)
    # Wide tables scroll by themselves, so that a narrow window still shows all of the text.
    body = body.replace("<table>", '<div class="table"><table>').replace("</table>", "</table></div>")
    heading = re.search(r"^#+ (.+)$", markdown, re.MULTILINE)
    title = html.escape(heading[1]) if heading else "linvit"
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width">\n<title>{title}</title>\n'
        f"<style>{STYLE}</style>\n{body}</html>\n"
    )
