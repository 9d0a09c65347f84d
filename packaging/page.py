"""The page of the package in a registry: README.md, whose links lead out of it. For setup.py.

`NNBURST_URL`, where the repository is read, is the one setting, of a build: links to files and pictures lead there, to
the tag of the version. Without it the page has the links' text alone, no pictures, and the package no addresses.
"""

from __future__ import annotations

import re

RELATIVE = r"\((?!\w+:|#)([^)\s]+)\)"
"""A target of Markdown within the tree."""


def links(text: str, url: str, tag: str) -> str:
    """Return a text of Markdown whose relative links and pictures are absolute, or none."""
    picture, link = (f"[\\1]({url}/{way}/{tag}/\\2)" if url else "" for way in ("raw", "blob"))
    text = re.sub(rf"!\[([^]]*)\]{RELATIVE}", f"!{picture}" if url else "", text)
    return re.sub(rf"(?<!!)\[([^]]+)\]{RELATIVE}", link or r"\1", text)


def addresses(url: str, tag: str) -> dict[str, str]:
    """Return the addresses of a package by their names."""
    places = {
        "Source": "",
        "Documentation": f"/blob/{tag}/docs/index.md",
        "Changelog": f"/blob/{tag}/CHANGELOG.md",
        "Issues": "/issues",
        "Security": "/security/policy",
    }
    return {name: url + place for name, place in places.items()} if url else {}
