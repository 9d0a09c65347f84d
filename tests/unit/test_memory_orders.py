"""The memory orders of the C core: where they are spelled, and that each is checked."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from support import ROOT
from support.processes import run_python

MODEL = ROOT / "tests" / "model"
sys.path.insert(0, str(MODEL))

import checker  # noqa: E402  beside the programs, to be run without the package
import mutate  # noqa: E402

SPELLS_AN_ATOMIC = re.compile(r"\b(__atomic_\w+|__sync_\w+|_Atomic|atomic_\w+|memory_order\w*|stdatomic)\b")


def test_one_header_owns_every_atomic() -> None:
    sources = [*(ROOT / "csrc").iterdir(), *(ROOT / "nnburst" / "_core").iterdir()]
    texts = {path.name: path.read_text(encoding="utf-8") for path in sources if path.suffix in (".c", ".h", ".py")}
    texts.pop("_nnburst.c", None)  # what cffi generates
    assert {name for name, text in texts.items() if SPELLS_AN_ATOMIC.search(text)} == {"nnb_atomic.h"}


def test_table_of_mutants_has_every_order_of_the_sources() -> None:
    rows = re.findall(r"^(\w+\.[ch]:.+?): (\w+).*$", mutate.TABLE.read_text("utf-8"), re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(mutant.name for mutant in mutate.mutants(checker.CORE)), (
        "the orders of csrc have changed: run `make prove-mutants` and bring tests/model/mutants.txt up to date"
    )
    assert {found for _, found in rows} - {"survived"} <= {*checker.PROGRAMS}
    assert sum(found != "survived" for _, found in rows) >= mutate.LEAST_CAUGHT * len(rows)
    assert mutate.reasons().keys() == {name for name, found in rows if found == "survived"}


def test_page_describes_every_program() -> None:
    page = (ROOT / "docs" / "internals" / "proof.md").read_text(encoding="utf-8")
    parts = re.findall(r"^- \*\*[\w ,]+\*\* \(([^)]+)\):", page, re.MULTILINE)
    described = [name for part in parts for name in re.findall(r"`([\w.]+)`", part)]
    assert sorted(described) == sorted([*checker.PROGRAMS, *(f"{name}.pml" for name in checker.PROTOCOLS)])


def test_prove_says_what_it_skips_and_passes(tmp_path: Path) -> None:
    done = run_python(str(MODEL / "prove.py"), env={**os.environ, "PATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert "spin and cc not on the PATH" in done.stdout
    assert f"{len(checker.PROGRAMS)} programs over the C sources: genmc is not on the PATH" in done.stdout


@pytest.mark.parametrize(("executions", "verdict"), [(0, "error"), (1, "proven")])
def test_program_without_a_complete_execution_proves_nothing(
    executions: int, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    genmc = tmp_path / "genmc"
    genmc.write_text(
        f"#!/bin/sh\necho No errors were detected.\necho Number of complete executions explored: {executions}\n"
        "echo Number of blocked executions seen: 3\n"
    )
    genmc.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert checker.genmc("channel", "rc11").verdict == verdict


@pytest.mark.check
@pytest.mark.skipif(bool(checker.missing("spin", "cc")), reason="spin is not on the PATH")
@pytest.mark.parametrize("protocol", checker.PROTOCOLS)
def test_protocol_is_proven_and_needs_each_of_its_parts(protocol: str) -> None:
    assert checker.spin(protocol, timeout=300).verdict == "proven"
    faults = re.findall(r"#ifdef (FAULT_\w+)", (MODEL / f"{protocol}.pml").read_text(encoding="utf-8"))
    assert len(faults) >= 5
    assert {fault: checker.spin(protocol, fault, timeout=300).verdict for fault in faults} == dict.fromkeys(
        faults, "error"
    )


@pytest.mark.check
@pytest.mark.skipif(bool(checker.missing("spin", "cc")), reason="spin is not on the PATH")
def test_protocol_that_fails_is_told_step_by_step() -> None:
    fault = re.findall(r"#ifdef (FAULT_\w+)", (MODEL / "burst.pml").read_text(encoding="utf-8"))[0]
    outcome = checker.spin("burst", fault, timeout=300)
    assert outcome.verdict == "error"
    assert re.search(r"proc +\d+ \(\w+:\d+\) burst\.pml:\d+", outcome.trace), outcome.trace
