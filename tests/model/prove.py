"""Runs the model checkers that are on the PATH over the C core: ``make prove``.

GenMC explores all executions of the programs here under two memory models, Spin all states of the protocol. Names of
programs limit the run: ``python tests/model/prove.py channel full``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import checker


def main(names: list[str]) -> int:
    failed = 0

    def report(what: str, check: Callable[[], checker.Outcome]) -> None:
        nonlocal failed
        start = time.monotonic()
        outcome = check()
        failed += outcome.verdict != "proven"
        print(f"{outcome.verdict:8} {what:32} {time.monotonic() - start:6.1f} s  {outcome.detail}", flush=True)

    unknown = set(names) - {*checker.PROGRAMS, *checker.PROTOCOLS}
    if unknown:
        print(f"no such program: {', '.join(sorted(unknown))}; there are {', '.join(checker.PROGRAMS)}")
        return 2
    if lacking := checker.missing("spin", "cc"):
        print(f"skipped  the protocol model: {' and '.join(lacking)} not on the PATH")
    else:
        for protocol in checker.PROTOCOLS:
            if not names or protocol in names:
                report(f"{protocol} (protocol)", lambda protocol=protocol: checker.spin(protocol))
    if checker.missing("genmc"):
        print(f"skipped  {len(checker.PROGRAMS)} programs over the C sources: genmc is not on the PATH")
    else:
        for program in checker.PROGRAMS:
            for model in checker.MODELS:
                if not names or program in names:
                    report(f"{program} ({model})", lambda p=program, m=model: checker.genmc(p, m))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
