"""The site: `make docs` builds it from these pages and from the docstrings; a warning is an error."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nnburst import __version__ as release

project = "nnburst"
author = "The nnburst authors"
copyright = author
version = release

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"nnburst {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
smartquotes = False  # smart quotes turn the two hyphens before an option into a dash
exclude_patterns = ["_build"]

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_default_options = {"members": True}
autodoc_preserve_defaults = True
add_module_names = False
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

# In docstrings a single pair of backquotes names something of this package; most of these are plain words to a reader.
default_role = "code"
nitpicky = False
suppress_warnings = [
    "misc.highlighting_failure",  # a language without colours, such as HAProxy's, is no error
    "toc.not_included",  # pages for maintainers are on a page of their own, not in the sidebar: tests/unit/test_docs.py
    "ref.python",  # an attribute may be named like a builtin, such as type
]

_LONGEST_SIGNATURE = 240


def setup(app: Any) -> None:
    """Make signatures short: the page shows what users give.

    A class has no signature if a function makes it (its `__init__` says "Use `create` instead."), or if it has many
    fields, which the page lists below the class. Keywords with an underscore are left out.
    """

    def shorten(app: Any, what: str, name: str, thing: Any, options: Any, signature: str | None, returned: Any) -> Any:
        is_made = what == "class" and (thing.__init__.__doc__ or "").startswith("Use `")
        if is_made or (what == "class" and len(signature or "") > _LONGEST_SIGNATURE):
            return "", ""
        return re.sub(r", _\w+=.*\)", ")", signature or "") or None, returned

    app.connect("autodoc-process-signature", shorten)
