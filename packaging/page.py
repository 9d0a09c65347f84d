"""The package's page in a registry: README.md with absolute links. For setup.py.

The environment variable `NNBURST_URL` is the repository's address. Links and pictures then refer to this address, at
the version's tag. Without the variable, the page has only the text of links and no pictures, and the metadata of the
package has no addresses.
"""

from __future__ import annotations

import re

RELATIVE = r"\((?!\w+:|#)([^)\s]+)\)"
"""Regular expression for the target of a Markdown link within the tree."""


def links(text: str, url: str, tag: str) -> str:
    """Make relative links and pictures in Markdown absolute. If `url` is empty, remove pictures and unlink texts."""
    picture, link = (f"[\\1]({url}/{way}/{tag}/\\2)" if url else "" for way in ("raw", "blob"))
    text = re.sub(rf"!\[([^]]*)\]{RELATIVE}", f"!{picture}" if url else "", text)
    return re.sub(rf"(?<!!)\[([^]]+)\]{RELATIVE}", link or r"\1", text)


def addresses(url: str, tag: str) -> dict[str, str]:
    """Return the addresses in the package's metadata, by name."""
    places = {
        "Source": "",
        "Documentation": f"/blob/{tag}/docs/index.md",
        "Changelog": f"/blob/{tag}/CHANGELOG.md",
        "Issues": "/issues",
        "Security": "/security/policy",
    }
    return {name: url + place for name, place in places.items()} if url else {}
