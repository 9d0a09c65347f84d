"""Measure the cost of idle sessions: processes, memory, threads, descriptors, and wake-ups.

``python benchmarks/at_rest.py [--markdown FILE]``
Each row is the increase over the row before, for this program and all processes that it has started. Memory is
anonymous and shared memory; memory that several processes map counts once. Mapped files, such as libraries, do not
count. The model is the network of handwritten digits.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from pathlib import Path

from programs import shared_service

import nnburst

DIGITS = Path(nnburst.__file__).parent / "cli" / "demo" / "data" / "digits.onnx"
SETTLED, WATCHED = 2.0, 10.0
"""Seconds before a row is measured, and seconds during which wake-ups are counted."""


def family() -> list[Path]:
    """Return the /proc directories of this process and all its descendants."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    known = {int(Path("/proc/self").resolve().name)}
    while more := {pid for pid, parent in parents.items() if parent in known} - known:
        known |= more
    return [Path("/proc", str(pid)) for pid in known]


def wakes(folders: list[Path]) -> int:
    """Return the number of times that threads of these processes have stopped to wait."""
    files = [file for folder in folders for file in folder.glob("task/*/status")]
    return sum(int(file.read_text().split("\nvoluntary_ctxt_switches:")[1].split()[0]) for file in files)


def memory(folder: Path) -> int:
    """Return the memory of a process in KiB, with its share of memory that several processes map."""
    rollup = (folder / "smaps_rollup").read_text()
    return sum(int(rollup.split(f"\n{kind}:")[1].split()[0]) for kind in ("Pss_Anon", "Pss_Shmem"))


def measure() -> list[float]:
    """Return the numbers of processes, MiB, threads and descriptors, and of wake-ups in ten seconds."""
    time.sleep(SETTLED)
    folders = family()
    before = wakes(folders)
    time.sleep(WATCHED)
    return [
        len(folders),
        sum(map(memory, folders)) / 1024,
        sum(len(list(folder.glob("task/*"))) for folder in folders),
        sum(len(list(folder.glob("fd/*"))) for folder in folders),
        wakes(folders) - before - 1,  # this program's own sleep does not count
    ]


def main() -> None:
    """Open services and sessions one by one, and print a row after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    lines = ["| added | processes | MiB | threads | descriptors | wakes in 10 s |", "|---|--:|--:|--:|--:|--:|"]
    with contextlib.ExitStack() as stack:
        serve = ("--model", f"digits={DIGITS}")
        steps = {
            "the program: an interpreter, NumPy, nnburst": lambda: None,
            "its first session of an ONNX model": lambda: stack.enter_context(nnburst.Session(DIGITS)),
            "a second one": lambda: stack.enter_context(nnburst.Session(DIGITS)),
            "`nnburst serve` with that model": lambda: opened.append(stack.enter_context(shared_service(*serve))),
            "a session of it": lambda: opened.append(stack.enter_context(nnburst.connect(opened[0]))),
        }
        opened: list = []
        last = [0.0] * 5
        for name, step in steps.items():
            step()
            if name == "a session of it":
                stack.enter_context(opened[1].session("digits"))
            now = measure()
            cells = [f"{each - before:,.0f}" for each, before in zip(now[:-1], last[:-1], strict=True)]
            lines.append(f"| {name} | {' | '.join(cells)} | {now[-1] - last[-1]:,.0f} |")
            print(lines[-1], flush=True)
            last = now
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
