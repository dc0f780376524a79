"""How Sphinx builds these pages."""

from fastcomm.version import __version__ as release

project = "fastcomm"
author = "The fastcomm authors"
project_copyright = f"2026, {author}"

extensions = ["myst_parser"]
exclude_patterns = ["_build"]
# The schemas keep their names, so that others can refer to them.
html_extra_path = ["../fastcomm/schemas"]
html_theme = "furo"
html_title = f"fastcomm {release}"
html_copy_source = False
myst_heading_anchors = 3
