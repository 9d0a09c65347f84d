"""A program that compiles one model with caching; a helper of test_cache_directory.

Arguments: the cache directory; a step of the hook or "-"; the action at that step ("kill", "hold", "tell" or "-"); and
the number of compilations. "tell" creates the file DIRECTORY.STEP. "hold" does the same, and waits for DIRECTORY.go.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import nnburst
from nnburst.cache.directory import Cache
from nnburst.runtime.compile import cache_sources

WEIGHTS = np.random.default_rng(5).normal(size=(300, 300)).astype(np.float32)
X = np.linspace(-1, 1, 300, dtype=np.float32)[None]


def build() -> nnburst.Model:
    b = nnburst.ModelBuilder()
    b.output("y", b.fully_connected(b.input("x", nnburst.OperandType.TENSOR_FLOAT32, (1, 300)), WEIGHTS))
    return b.build()


def compile_once(cache: Cache, model: nnburst.Model) -> str:
    """Compile or restore, check the result, and return the outcome."""
    with nnburst.in_process() as service, nnburst.nnapi.Compilation(model, service.devices) as compilation:
        compilation._cache = cache_sources.DirectoryCache(cache, bytes(32))
        compilation.finish()
        execution, y = nnburst.nnapi.Execution(compilation), np.empty((1, 300), np.float32)
        execution.set_input(0, X)
        execution.set_output(0, y)
        execution.compute()
        assert np.allclose(y, X @ WEIGHTS.T, atol=1e-4)
        report = compilation.cache_report
        return f"{report.outcome}/{report.reason.value}/{report.rejected.value if report.rejected else '-'}"


def main() -> None:
    directory, step, what, rounds = sys.argv[1:5]

    def hook(at: str) -> None:
        if at != step:
            return
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        Path(f"{directory}.{step}").touch()
        while what == "hold" and not Path(f"{directory}.go").exists():
            time.sleep(0.005)

    cache, model = Cache(directory, hook=hook), build()
    for _ in range(int(rounds)):
        print(compile_once(cache, model), flush=True)
        if int(rounds) > 1:
            for info in cache.entries():
                if np.random.default_rng().random() < 0.5:
                    cache.remove(info.entry, info.generation)


if __name__ == "__main__":
    main()
