"""Every test begins with a clean environment, and leaves the process as it found it: see `nnburst.testing`."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

from nnburst.testing import assert_nothing_left

pytest.register_assert_rewrite("support")
pytest_plugins = ["nnburst.testing.pytest_plugin"]

# What a user has set for Python or for this package says how to run programs, not how to test them: a test sets what it
# needs. A service that a test starts imports the package from bytecode in half the time, unless a variable forbids to
# write any; the tests start hundreds. NNBURST_TEST_* are for the tests. Workers of pytest-xdist import this, too.
for _name in list(os.environ):
    if _name.startswith(("PYTHON", "NNBURST_")) and not _name.startswith("NNBURST_TEST_"):
        del os.environ[_name]
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # or each copy of the library in a process opens files of its own


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "leaks(reason): do not check what the test or its module leaves behind, and why")
    # A shell starts background jobs with Ctrl-C ignored, and children inherit that; some tests send it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session: pytest.Session) -> None:
    # The leak check collects garbage: it need not look at a million objects of collected tests each time.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def module_leaves_nothing(request: pytest.FixtureRequest, _fork_server: None) -> Iterator[None]:
    """Fail if a module leaves something behind. In `faults/` each test is checked, too."""
    if any(item.get_closest_marker("leaks") for item in request.session.items if item.path == request.path):
        yield
        return
    resource_tracker.ensure_running()
    try:
        with assert_nothing_left():
            yield
    except AssertionError as error:
        pytest.fail(f"{request.node.name} is over: {error}", pytrace=False)


@pytest.fixture
def open_to_guests() -> Iterator[Path]:
    from support.users import open_directory

    with open_directory() as directory:
        yield directory


def _held() -> int:
    return len(os.listdir("/proc/self/fd")) + threading.active_count()


@pytest.fixture(autouse=True)
def releases_its_objects(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Release what a test had, for the check above."""
    held = _held()
    yield
    for phase in ("setup", "call"):
        caplog.get_records(phase).clear()
    if request.node.funcargs is not None:
        request.node.funcargs.clear()
    if _held() > held:
        gc.collect()  # what lies in cycles goes now: the next test may count what it opens
