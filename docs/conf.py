"""The site: `make docs` builds it from these pages and from the docstrings; a warning is an error."""

from __future__ import annotations

import enum
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nnburst import OperationType
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


def _shorten(app: Any, what: str, name: str, thing: Any, options: Any, signature: str | None, returned: Any) -> Any:
    """Leave out what users do not give.

    A class has no signature if it is an enumeration, if a function makes its objects (`__init__` says "Use `create`
    instead."), or if it has many fields, which the page lists below the class. Keywords with an underscore are left
    out.
    """
    if what == "class":
        made = issubclass(thing, enum.Enum) or (thing.__init__.__doc__ or "").startswith("Use `")
        if made or len(signature or "") > _LONGEST_SIGNATURE:
            return "", ""
    return re.sub(r", _\w+=.*\)", ")", signature or "") or None, returned


def _complete(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Repeat the description of "scale, zero_point" for each, and add all values of an enumeration."""
    joined = re.compile(r"^:ivar (\w+(?:, \w+)+):(.*\n(?: +.*\n)*)", re.MULTILINE)
    lines[:] = joined.sub(
        lambda found: "".join(f":ivar {each}:{found[2]}" for each in found[1].split(", ")), "\n".join(lines)
    ).split("\n")
    if isinstance(thing, enum.EnumType) and thing is not OperationType:  # operations have a page
        lines += ["Values: " + ", ".join(f"``{value}``" for value in thing.__members__) + ".", ""]


def setup(app: Any) -> None:
    """Change what the docstrings alone would give."""
    app.connect("autodoc-process-signature", _shorten)
    app.connect("autodoc-process-docstring", _complete)
