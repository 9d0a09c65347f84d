"""Fixtures for tests of programs that use nnburst. pytest loads them automatically; docs/testing.md explains them.

Each test has its own services and directories, so tests can run in any order and in parallel (pytest-xdist).
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ..runtime.service import Service

_VARIABLES = {"NNBURST_CACHE_DIR": "cache", "NNBURST_STATE_DIR": "state", "NNBURST_RUNTIME_DIR": "run"}


@pytest.fixture
def nnburst_leaves_nothing(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail if the test leaves descriptors, threads, processes, mappings or shared memory behind.

    List this fixture before other fixtures to include their leaks.
    """
    from multiprocessing import resource_tracker

    from .leaks import assert_nothing_left

    resource_tracker.ensure_running()  # multiprocessing starts it once, for good
    try:
        with assert_nothing_left():
            yield
            for phase in ("setup", "call"):  # tracebacks in log records keep local variables
                caplog.get_records(phase).clear()
            if request.node.funcargs is not None:  # None if pytest was interrupted
                request.node.funcargs.clear()  # arrays among the values would keep their memory
    except AssertionError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture
def nnburst_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set new directories for compiled models, for a service's trust store and for sockets.

    Returns the directory that contains the new directories: ``cache``, ``state`` and ``run``.
    """
    for variable, name in _VARIABLES.items():
        (tmp_path / name).mkdir(mode=0o700, exist_ok=True)
        monkeypatch.setenv(variable, str(tmp_path / name))
    return tmp_path


@pytest.fixture
def nnburst_launch(nnburst_directories: Path) -> Iterator[Callable[..., Service]]:
    """Return `nnburst.launch`, with fault points by default. Services are closed after the test."""
    from ..runtime.open_service import launch as start

    with ExitStack() as stack:

        def launch(*, faults: bool = True, **options: Any) -> Service:
            return stack.enter_context(start(faults=faults, **options))

        yield launch


@pytest.fixture
def nnburst_service(nnburst_launch: Callable[..., Service]) -> Service:
    """Return a new service with fault points."""
    return nnburst_launch()


@pytest.fixture(scope="session")
def _fork_server() -> Iterator[None]:
    """Start multiprocessing's fork server before its first use, and end it after the last test."""
    from multiprocessing import forkserver, resource_tracker

    resource_tracker.ensure_running()
    forkserver.ensure_running()
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


@pytest.fixture(params=["fork", "spawn", "forkserver"])
def nnburst_start_method(request: pytest.FixtureRequest, _fork_server: None) -> BaseContext:
    """Return a context of multiprocessing. The test runs once per start method."""
    context: BaseContext = multiprocessing.get_context(request.param)
    return context
