"""Every test leaves the process as it found it: see `nnburst.testing`."""

from __future__ import annotations

import os
import signal

import pytest

pytest_plugins = ["nnburst.testing.pytest_plugin"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "leaks(reason): do not check what the module leaves behind, and why")
    # A shell starts background jobs with Ctrl-C ignored, and children inherit that; some tests send it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # A service that a test starts imports the package: from bytecode in half the time. The tests start hundreds.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> None:
    if not request.node.get_closest_marker("leaks"):
        request.getfixturevalue("nnburst_leaves_nothing")
