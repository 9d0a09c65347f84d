"""A service that has a part of the kernel's hierarchy of groups makes a group for each user's workers there."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import nnburst
from nnburst.errors import DeadObject, NNBurstError
from nnburst.service.process.cgroup import NICENESS
from support.models import relu
from support.processes import worker_of
from support.services import Shared, shared_service
from support.users import as_root
from support.waiting import until

X = {"x": np.ones((1, 4), np.float32)}
pytestmark = [pytest.mark.check, as_root]


@pytest.fixture
def delegated() -> Iterator[Path]:
    """A group that is nobody's yet, marked as by a service manager."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    node = next((Path(place) / f"nnburst-{os.getpid()}" for _, place, kind, *_ in mounts if kind == "cgroup2"), None)
    if node is None:
        pytest.skip("needs a cgroup v2 hierarchy")
    try:
        node.mkdir()
        os.setxattr(node, "user.delegate", b"1")
    except OSError as error:
        with contextlib.suppress(OSError):
            node.rmdir()
        pytest.skip(f"needs a cgroup v2 hierarchy that it may write: {error}")
    try:
        yield node
    finally:
        for group in [*filter(Path.is_dir, node.iterdir()), node]:
            until(lambda: is_removed(group), f"{group} is not empty")  # noqa: B023


@pytest.fixture
def start(delegated: Path, tmp_path: Path) -> Iterator[Callable[..., Shared]]:
    def enter() -> None:
        (delegated / "cgroup.procs").write_text(str(os.getpid()))

    with contextlib.ExitStack() as stack:
        options = "--device", "nnburst-reference"
        yield lambda *more: stack.enter_context(shared_service(tmp_path, *options, *more, preexec_fn=enter))


def is_removed(group: Path) -> bool:
    """Whether it is gone, once its last process is."""
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


def members(group: Path) -> set[int]:
    return {int(line) for line in (group / "cgroup.procs").read_text().split()}


def groups_of(node: Path) -> dict[str, set[int]]:
    found = {}
    for group in filter(Path.is_dir, node.iterdir()):
        with contextlib.suppress(OSError):  # it has just gone with its last process
            found[group.name] = members(group)
    return found


def needs(node: Path, controller: str) -> None:
    if controller not in (node / "cgroup.controllers").read_text().split():
        pytest.skip(f"needs the controller {controller} in cgroup v2")


def test_workers_are_in_groups_of_their_users_which_go_with_them(start: Callable[..., Shared], delegated: Path) -> None:
    shared = start("--isolate", "connection")
    assert shared.ready["accounts"].startswith(f"{delegated} ")
    own = f"user-{os.geteuid()}"
    with nnburst.connect(shared.address) as first, nnburst.connect(shared.address) as second:
        with first.session(relu((1, 4))) as session, second.session(relu((1, 4))) as other:
            workers = {worker_of(session), worker_of(other)}
            groups = groups_of(delegated)
            assert (groups[own], groups["named"]) == (workers, {first.pid})
            assert shared.pid in groups["broker"]
            assert not members(delegated)
            os.kill(worker_of(session), signal.SIGKILL)
            with pytest.raises(DeadObject):
                until(lambda: not session.run(None, X))
            until(lambda: groups_of(delegated)[own] == {worker_of(other)})
            other.run(None, X)
    until(lambda: own not in groups_of(delegated), lambda: f"{groups_of(delegated)}")
    shared.end()
    assert groups_of(delegated) == {"broker": set()}


def test_kernel_ends_the_worker_that_takes_too_much_memory_and_its_clients_know_why(
    start: Callable[..., Shared], delegated: Path
) -> None:
    needs(delegated, "memory")
    shared = start("--quota", f"user.process_bytes={256 << 20}")
    b = nnburst.ModelBuilder()
    x = b.input("x", nnburst.OperandType.TENSOR_FLOAT32, (1, 4))
    b.output("y", b.tile(x, np.array([1 << 11, 1536], np.int32)))  # 48 MiB
    with nnburst.connect(shared.address) as service:
        with service.session(relu((1, 4))) as session:
            worker = worker_of(session)
            assert (delegated / f"user-{os.geteuid()}" / "memory.max").read_text().split() == [str(256 << 20)]
            with pytest.raises(DeadObject, match=r"went over process_bytes"), service.session(b.build()) as greedy:
                executions = [greedy.bind() for _ in range(8)]  # in memory that the worker is the first to use
                for execution in executions:
                    execution.run()
        assert service.alive
    with nnburst.connect(shared.address) as service, service.session(relu((1, 4))) as session:
        session.run(None, X)
        assert worker_of(session) != worker
    assert "went over process_bytes" in shared.log.read_text()


def test_kernel_refuses_threads_that_a_user_may_not_have(start: Callable[..., Shared], delegated: Path) -> None:
    needs(delegated, "pids")
    shared = start("--quota", "user.process_threads=2")
    with nnburst.connect(shared.address) as service:
        with pytest.raises(NNBurstError) as refused, service.session(relu((1, 4))):
            pass
        assert not isinstance(refused.value, DeadObject)
        assert service.alive


def test_kernel_shares_the_processors_by_quota_and_niceness(start: Callable[..., Shared], delegated: Path) -> None:
    needs(delegated, "cpu")
    shared = start("--quota", "user.processors=1")
    group = delegated / f"user-{os.geteuid()}"
    with nnburst.connect(shared.address) as service, service.session(relu((1, 4))) as session:
        assert (group / "cpu.weight.nice").read_text().strip() == str(NICENESS)
        most = "100000" if (os.cpu_count() or 1) > 1 else "max"
        assert (group / "cpu.max").read_text().split() == [most, "100000"]
        session.run(None, X)
