"""Count the system calls of an execution while both sides poll.

Runs the same program twice under ``strace -f -c``, client and service together, once with a few executions and once
with many more, and divides the difference by the number of executions. Without strace (or where ptrace is forbidden)
it prints the library's own counters of futex waits and wakes.

    python benchmarks/syscalls.py [--count 20000] [--polling-window 50]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

BASELINE = 1000  # executions of the short run, which has the same start-up, warm-up and end


def execute(count: int, polling_window: float) -> dict[str, Any]:
    """Run `count` executions on the no-op device and return the session's counters."""
    import nnburst
    from nnburst import ModelBuilder, OperandType
    from nnburst.cli.bench.rounds import allowed_cpus, pin_process

    builder = ModelBuilder()
    x = builder.input("x", OperandType.TENSOR_QUANT8_ASYMM, (1, 32), scale=1.0, zero_point=0)
    builder.output("y", builder.relu(x))
    cpus = allowed_cpus()
    with nnburst.launch(devices=["nnburst-noop"]) as service:
        with service.session(builder.build(), polling_window=polling_window) as session:
            bound = session.bind()
            pin_process(os.getpid(), {cpus.client})
            pin_process(service.pid, {cpus.server})
            run = bound.run
            for _ in range(count):
                run()
            return _plain(session.stats)


def _plain(stats: Any) -> dict[str, Any]:
    if isinstance(stats, dict):
        return {name: value for name, value in stats.items() if isinstance(value, int | float)}
    names = (name for name in dir(stats) if not name.startswith("_"))
    return {name: value for name in names if isinstance(value := getattr(stats, name), int | float)}


def _strace(count: int, polling_window: float) -> Counter[str]:
    """Run this program under strace. Return the count of each system call, of client and service together."""
    with tempfile.TemporaryDirectory() as directory:
        summary = Path(directory) / "summary"
        command = ["strace", "-f", "-c", "-U", "name,calls", "-o", str(summary), sys.executable, __file__]
        command += ["--run", str(count), "--polling-window", str(polling_window * 1e6)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        calls: Counter[str] = Counter()
        for line in summary.read_text().splitlines():
            words = line.split()
            if len(words) == 2 and words[1].isdigit() and words[0] != "total":
                calls[words[0]] += int(words[1])
        return calls


def main() -> None:
    """Print the calls per execution."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000, help="executions")
    parser.add_argument("--polling-window", type=float, default=50.0, help="microseconds")
    parser.add_argument("--run", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    window = options.polling_window / 1e6
    if options.run is not None:
        print(json.dumps(execute(options.run, window)))
        return
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("both sides can only poll if they have a CPU each; this process may use one")
    if shutil.which("strace"):
        try:
            short = _strace(BASELINE, window)
            long = _strace(BASELINE + options.count, window)
        except subprocess.CalledProcessError as error:
            print(f"strace failed: {error.stderr.decode(errors='replace').strip().splitlines()[-1:]}", file=sys.stderr)
        else:
            extra = {name: long[name] - short[name] for name in long if long[name] > short[name]}
            print(f"strace: {options.count} executions, client and service together")
            for name, calls in sorted(extra.items(), key=lambda item: -item[1]):
                print(f"  {name:20} {calls:8} more, {calls / options.count:.5f} per execution")
            print(f"  {'all':20} {sum(extra.values()) / options.count:.5f} system calls per execution")
    print(f"counters of the session after {options.count} executions (nothing traced):")
    for name, value in execute(options.count, window).items():
        print(f"  {name:20} {value}")


if __name__ == "__main__":
    main()
