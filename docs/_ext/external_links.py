"""A list of the links that lead out of the site, which a build does not follow: `external-links.txt`."""

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True}


def _write(app: Sphinx, error: Exception | None) -> None:
    if error:
        return
    links = {
        (link["refuri"], page)
        for page in app.env.found_docs
        for link in app.env.get_doctree(page).findall(nodes.reference)
        if link.get("refuri", "").startswith("http")
    }
    lines = [f"{link}\t{page}\n" for link, page in sorted(links)]
    Path(app.outdir, "external-links.txt").write_text("".join(lines))
