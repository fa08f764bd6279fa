"""How Sphinx makes the site of `make docs`, which needs no network to be built or read."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import linvit

project = "linvit"
author = "The linvit authors"
version = release = linvit.__version__
project_copyright = author

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "commands", "external_links", "mathml"]
# The parts of docs/bench/README.md.
exclude_patterns = ["bench/[!R]*.md"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
highlight_language = "none"
smartquotes = False  # which would make dashes of the two of an option
default_role = "code"  # as Markdown has it, in docstrings
html_math_renderer = "mathml"

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 80
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"linvit {release}"
html_copy_source = False
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["linvit.css"]
