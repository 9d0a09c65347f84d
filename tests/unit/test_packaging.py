"""What builds wheels, where no compiler is needed for it."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
from lines import lines
from page import addresses, links
from wheels import unpack

README = (
    "![a picture\nof it](docs/a.svg) [one](docs/faq.md) [two](docs/memory.md#part), [out](https://x.test/) [here](#p)\n"
)


def test_sdist_is_unpacked_also_by_a_python_without_filters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython 3.11.3 and older: Debian 12 has 3.11.2."""
    usual = tarfile.TarFile.extractall

    def old(self: Any, path: Any = ".", members: Any = None, *, numeric_owner: bool = False) -> None:
        usual(self, path, members, numeric_owner=numeric_owner)

    monkeypatch.setattr(tarfile.TarFile, "extractall", old)
    tree = tmp_path / "nnburst-1.0"
    (tree / "csrc").mkdir(parents=True)
    (tree / "csrc" / "nnburst.h").write_text("text")
    sdist = tmp_path / "nnburst-1.0.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        archive.add(tree, tree.name)
    unpacked = unpack(sdist, tmp_path / "work")
    assert unpacked == tmp_path / "work" / "nnburst-1.0"
    assert (unpacked / "csrc" / "nnburst.h").read_text() == "text"


def test_links_of_the_page_lead_to_the_tag_of_the_version_and_stay_within_it_otherwise() -> None:
    at = "https://host.test/nnburst"
    assert links(README, at, "v1.0") == (
        f"![a picture\nof it]({at}/raw/v1.0/docs/a.svg) [one]({at}/blob/v1.0/docs/faq.md) "
        f"[two]({at}/blob/v1.0/docs/memory.md#part), [out](https://x.test/) [here](#p)\n"
    )
    assert set(addresses(at, "v1.0").values()) >= {at, f"{at}/issues"}


def test_page_of_a_package_without_an_address_has_no_dead_links() -> None:
    assert links(README, "", "v1.0") == " one two, [out](https://x.test/) [here](#p)\n"
    assert addresses("", "v1.0") == {}


def test_lines_of_source_are_those_without_blanks_comments_and_docstrings() -> None:
    source = '''"""A module,
in two lines."""

import os  # a comment beside it counts no more

LIMIT = 3
"""A limit."""


# alone
def f(text: str = """two
lines""") -> str:
    "Says."
    return text.join(

        "# no comment"
    )
'''
    assert lines(source) == 7
