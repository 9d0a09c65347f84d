"""Find broken links in the built pages: the file is missing, or the file does not have the anchor.

python docs/links.py docs/_build/html
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The anchors and the link targets of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.places: set[str] = set()
        self.links: set[str] = set()
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Store a tag's anchor or link target."""
        for name, value in attrs:
            if name == "id":
                self.places.add(value or "")
            elif name in ("href", "src"):
                self.links.add(value or "")


def broken(site: Path) -> Iterator[str]:
    """Yield the broken links between the pages of a site."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        for link in sorted(page.links):
            url = urlsplit(link)
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            if url.scheme or url.netloc:
                continue
            if not target.exists() or (target in pages and {unquote(url.fragment)} - pages[target].places - {""}):
                yield f"{path.relative_to(site.resolve())}: {link}"


if __name__ == "__main__":
    found = list(broken(Path(sys.argv[1])))
    print(*found, sep="\n", end="\n" * bool(found))
    sys.exit(bool(found))
