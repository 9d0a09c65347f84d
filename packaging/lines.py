"""Print the lines of each room, and the words of Markdown.

Python is counted without blank lines, comments and docstrings; C and headers are counted as they are.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("*.md", ".github/*.md", "docs/**/*.md", "examples/**/*.md", "nnburst/**/*.md", "tests/**/*.md")
GROUPS = {
    "maintainers' pages": (
        "ARCHITECTURE",
        "CONTRIBUTING",
        "docs/WIRE",
        "docs/internals",
        "docs/releasing",
        "docs/requirements",
        "tests",
    ),
    "users' pages": ("README", "docs", "examples"),
    "other Markdown": ("",),
}
"""Prefixes of the paths of each group. The first group that matches counts."""
MADE = re.compile(r"(?ms)\A[^\n]*\n\nMade by `make tables`.*|<!-- made: .*?<!-- end -->|^```.*?^```")
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def lines(text: str) -> int:
    """Count the lines of a module, except blank lines, comments and docstrings."""
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in LAYOUT
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):  # a string that stands alone may also document an attribute
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            code -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(code)


def rooms() -> Counter[str]:
    """Return the lines of each folder of the package, of its other modules, of the tests and of the core."""
    found: Counter[str] = Counter()
    for path in sorted([*ROOT.glob("nnburst/**/*.py"), *ROOT.glob("tests/**/*.py")]):
        first, *folder = path.relative_to(ROOT).parts[:-1]
        name = first if first == "tests" else f"{first}/{folder[0]}" if folder else f"{first}/*.py"
        found[name] += lines(path.read_text(encoding="utf-8"))
    for path in [*ROOT.glob("csrc/*.[ch]"), *ROOT.glob("nnburst/_core/*.h")]:
        found[f"{path.parent.relative_to(ROOT)}/*.[ch]"] += len(path.read_text(encoding="utf-8").splitlines())
    return found


def words() -> Counter[str]:
    """Return numbers of words of Markdown: written words by group, then words in programs and in generated tables."""
    found: Counter[str] = Counter()
    for path in (path for pattern in PAGES for path in ROOT.glob(pattern)):
        name = str(path.relative_to(ROOT))
        group = next(group for group, beginnings in GROUPS.items() if name.startswith(beginnings))
        text = path.read_text(encoding="utf-8")
        found[f"words, {group}"] += len(MADE.sub("", text).split())
        found["words, programs and made tables"] += sum(len(part.split()) for part in MADE.findall(text))
    return found


if __name__ == "__main__":
    counted = rooms()
    counted["nnburst, all Python"] = sum(counted[name] for name in counted if "nnburst" in name and ".[ch]" not in name)
    counted |= words()
    counted["words, all Markdown"] = words().total()
    for name, count in counted.items():
        print(f"{count:7,}  {name}")
