"""Runs the model checkers that are on the PATH over the C core: ``make prove``.

GenMC explores all executions of the programs here under two memory models, Spin all states of the protocol. Names of
programs limit the run: ``python tests/model/prove.py channel full``. ``--show`` prints what led to a failure. With
``--markdown FILE`` it writes a table of executions and seconds of processor time, too:
``docs/tables.py --store proofs FILE`` stores it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import checker


def table(cells: dict[tuple[str, str], list[str]]) -> str:
    """Executions and seconds of each program, under each model."""
    head = "".join(f" {model.upper()}: executions | seconds |" for model in checker.MODELS)
    lines = [f"| program |{head}", "|---|" + "--:|--:|" * len(checker.MODELS)]
    for program in sorted({program for program, _ in cells}):
        row = [cell for model in checker.MODELS for cell in cells.get((program, model), ["", ""])]
        lines.append(f"| `{program}` | {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the model checkers that are on the PATH over the C core.")
    parser.add_argument("names", nargs="*", help="programs; without any, all of them")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write a table of executions and seconds")
    parser.add_argument("--show", action="store_true", help="print the trace of an execution that fails")
    options = parser.parse_args()
    names: list[str] = options.names
    cells: dict[tuple[str, str], list[str]] = {}
    failed = 0

    def report(what: str, check: Callable[[], checker.Outcome]) -> list[str]:
        nonlocal failed
        before = os.times().children_user
        outcome = check()
        seconds = os.times().children_user - before
        failed += outcome.verdict != "proven"
        print(f"{outcome.verdict:8} {what:32} {seconds:6.1f} s  {outcome.detail}", flush=True)
        if options.show:
            print(outcome.trace, flush=True)
        return [outcome.detail.removesuffix(" executions"), f"{seconds:.1f}"]

    unknown = set(names) - {*checker.PROGRAMS, *checker.PROTOCOLS}
    if unknown:
        print(f"no such program: {', '.join(sorted(unknown))}; there are {', '.join(checker.PROGRAMS)}")
        return 2
    if lacking := checker.missing("spin", "cc"):
        print(f"skipped  the protocol model: {' and '.join(lacking)} not on the PATH")
    else:
        for protocol in checker.PROTOCOLS:
            if not names or protocol in names:
                report(f"{protocol} (protocol)", partial(checker.spin, protocol))
    if checker.missing("genmc"):
        print(f"skipped  {len(checker.PROGRAMS)} programs over the C sources: genmc is not on the PATH")
    else:
        for program in checker.PROGRAMS:
            for model in checker.MODELS:
                if not names or program in names:
                    cells[program, model] = report(f"{program} ({model})", partial(checker.genmc, program, model))
    if options.markdown:
        options.markdown.write_text(table(cells), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
