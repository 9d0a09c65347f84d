"""What a stranger finds beside the code: each command that it names can be run, and nothing is named in vain."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from page import addresses, links

from nnburst._version import VERSION
from nnburst.cli.serve.command import serve
from support import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
NAMING = [*WORKFLOWS, ROOT / "CONTRIBUTING.md", *(ROOT / ".github").glob("*.md"), ROOT / "Makefile"]
TARGETS = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


def steps(workflow: Path) -> list[str]:
    """The commands of a workflow: each is one line."""
    return re.findall(r"^ +(?:- )?run: (.+)$", workflow.read_text("utf-8"), re.MULTILINE)


@pytest.mark.parametrize("path", NAMING, ids=lambda path: path.name)
def test_make_targets_that_are_named_exist(path: Path) -> None:
    found = re.findall(r"(?:^#   |`|run: |^)make ([a-z][\w-]*)", path.read_text("utf-8"), re.MULTILINE)
    assert found
    assert set(found) <= TARGETS
    if path.name == "Makefile":
        assert set(found) == TARGETS  # each is explained


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_each_step_is_a_command_that_runs_on_any_machine(workflow: Path) -> None:
    assert steps(workflow)
    matrix = re.search(r"target: \[(.+)\]", workflow.read_text("utf-8"))
    assert not matrix or set(matrix[1].split(", ")) <= TARGETS
    other = [step for step in steps(workflow) if step != ".ci/run" and not step.startswith("make ")]
    assert [step.split()[0:3] for step in other] == [["gh", "release", "create"]] * (workflow.stem == "release")


def test_actions_of_others_are_named_by_commit() -> None:
    used = [line for path in WORKFLOWS for line in re.findall(r"uses: (.+)$", path.read_text("utf-8"), re.MULTILINE)]
    assert len(used) > 10
    loose = {line for line in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", line)}
    assert not loose


def test_ci_runs_each_python_that_the_package_names() -> None:
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text("utf-8"))
    matrix = re.search(r"python: \[(.+)\]", (ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
    assert matrix
    assert re.findall(r'"(3\.\d+)"', matrix[1]) == named


def test_citation_is_of_this_version() -> None:
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text("utf-8")


def test_interpreter_without_its_lock_is_refused_with_what_to_do() -> None:
    program = "import sys; sys._is_gil_enabled = lambda: False; import nnburst._core"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "ImportError: nnburst needs the interpreter lock: set PYTHON_GIL=1" in done.stderr


DEPLOYED = [
    path for path in sorted((ROOT / "deploy").rglob("*")) if path.suffix in ("", ".yaml", ".service", ".conf", ".cfg")
]
DEPLOYED = [path for path in DEPLOYED if path.is_file()]


@pytest.mark.parametrize("path", DEPLOYED, ids=lambda path: str(path.relative_to(ROOT / "deploy")))
def test_options_of_deployed_services_exist(path: Path) -> None:
    known = {option for parameter in serve.params for option in parameter.opts}
    text = path.read_text("utf-8")
    commands = re.findall(r"^(?:ENTRYPOINT|.*nnburst serve| +args:| +command: \[\"--).*$", text, re.MULTILINE)
    assert commands
    assert set(re.findall(r"--[a-z][\w-]*", "\n".join(commands))) <= known


# ---- what builds wheels --------------------------------------------------------------------------------------------


README = (
    "![a picture\nof it](docs/a.svg) [one](docs/faq.md) [two](docs/memory.md#part), [out](https://x.test/) [here](#p)\n"
)


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
