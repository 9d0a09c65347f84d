"""Every test begins with a clean environment, and leaves the process as it found it: see `nnburst.testing`."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("support")
pytest_plugins = ["nnburst.testing.pytest_plugin"]

# What a user has set for Python or for this package says how to run programs, not how to test them: a test sets what it
# needs. A service that a test starts imports the package from bytecode in half the time, unless a variable forbids to
# write any; the tests start hundreds. NNBURST_TEST_* are for the tests. Workers of pytest-xdist import this, too.
for _name in list(os.environ):
    if _name.startswith(("PYTHON", "NNBURST_")) and not _name.startswith("NNBURST_TEST_"):
        del os.environ[_name]
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # or each copy of the library in a process opens files of its own

LIMIT = float(os.environ.get("NNBURST_TEST_LIMIT", "inf"))
"""Seconds of processor time that a test of `make test` may take, with its processes. `.ci/run` sets it."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "leaks(reason): do not check what the module leaves behind, and why")
    # A shell starts background jobs with Ctrl-C ignored, and children inherit that; some tests send it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session: pytest.Session) -> None:
    # The leak check collects garbage: it need not look at a million objects of collected tests each time.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> None:
    if not request.node.get_closest_marker("leaks"):
        request.getfixturevalue("nnburst_leaves_nothing")


@pytest.fixture(autouse=True)
def is_cheap_or_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail if a test of `make test` takes much processor time."""
    before = sum(os.times()[:4])
    yield
    used = sum(os.times()[:4]) - before
    if used > LIMIT and not {"check", "nightly", "soak"} & {mark.name for mark in request.node.iter_markers()}:
        pytest.fail(f"{used:.1f} s of processor time: make it cheaper, or mark it `check`", pytrace=False)
