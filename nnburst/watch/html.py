"""Small tables for notebooks."""

from __future__ import annotations

from collections.abc import Iterable


def table(title: str, rows: Iterable[Iterable[object]], head: Iterable[str] = ()) -> str:
    """Return an HTML table with a caption; everything in it is text."""
    from html import escape

    def line(cells: Iterable[object], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    headings = [line(head, "th")] if head else []
    body = "".join([*headings, *(line(row, "td") for row in rows)])
    return f"<table><caption>{escape(title)}</caption>{body}</table>"
