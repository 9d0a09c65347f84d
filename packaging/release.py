"""Print the notes of a release: the part of CHANGELOG.md for a tag. See `make release-notes TAG=v1.2.3`.

Ends with an error if the tag does not match the version in the tree, or the changelog has no date for it.
"""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def notes(tag: str, version: str, changelog: str) -> str:
    """Return the text below the heading of a version. Ends the program with a message if something is missing."""
    if tag != f"v{version}":
        sys.exit(f"release: the tag {tag!r} is not of version {version}: nnburst/_version.py has to say the same")
    found = re.search(rf"^## {re.escape(version)} \(([^)\n]+)\)\n(.*?)(?=^## |\Z)", changelog, re.DOTALL | re.MULTILINE)
    if not found or not re.fullmatch(r"\d{4}-\d\d-\d\d", found[1]):
        sys.exit(f"release: CHANGELOG.md has no heading '## {version} (YEAR-MONTH-DAY)'")
    return found[2].strip() + "\n"


if __name__ == "__main__":
    version = runpy.run_path(str(ROOT / "nnburst" / "_version.py"))["VERSION"]
    text = notes(sys.argv[1], version, (ROOT / "CHANGELOG.md").read_text("utf-8"))
    (ROOT / "dist").mkdir(exist_ok=True)
    (ROOT / "dist" / "notes.txt").write_text(text, "utf-8")
    print(text, end="")
