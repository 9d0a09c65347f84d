"""Services with a real-time policy and CPUs of their own: who gets them, who is refused, who polls."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nnburst
from nnburst.burst.polling import window_ns
from nnburst.errors import DeviceUnavailable, InvalidArgument
from nnburst.service.process.launch import _level
from nnburst.service.process.options import POLICIES, Scheduling, ServiceOptions
from support.models import relu
from support.processes import line_of, run_python, start_python, wait_gone
from support.services import shared_service
from support.waiting import PATIENCE

CPUS = sorted(os.sched_getaffinity(0))


def in_thread(work: Callable[[], Any]) -> Any:
    """Run in a thread of its own, which may become what it likes; raise what it raises."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def real_time_is_allowed() -> bool:
    try:
        in_thread(Scheduling("fifo", 21).apply)  # one more than the tests ask for
    except DeviceUnavailable:
        return False
    return True


@pytest.fixture
def real_time() -> None:
    if not real_time_is_allowed():
        pytest.skip("SCHED_FIFO is refused to this user")


def threads_of(pid: int) -> Iterator[tuple[str, int, frozenset[int]]]:
    """Yield policy, priority and CPUs of each thread of a process."""
    names = {number: name for name, number in POLICIES.items()}
    for tid in map(int, os.listdir(f"/proc/{pid}/task")):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            policy, cpus = names.get(os.sched_getscheduler(tid), ""), frozenset(os.sched_getaffinity(tid))
            yield policy, os.sched_getparam(tid).sched_priority, cpus


@pytest.mark.check
def test_a_shared_service_has_what_its_command_line_says(real_time: None, tmp_path: Path) -> None:
    with shared_service(tmp_path, "--scheduler=rr:3", "--isolate=none") as shared:
        with nnburst.connect(shared.address) as service, service.session(relu()) as session:
            session.bind().run()
            threads = set(threads_of(service.pid))
    assert {thread[:2] for thread in threads} == {("rr", 3), ("rr", 4)}  # 4: ends it if need be


def test_each_thread_of_a_service_has_what_launch_was_told(real_time: None) -> None:
    cpus = frozenset(CPUS[-1:])
    with nnburst.launch(devices=["nnburst-noop"], scheduler=("fifo", 20), affinity=cpus) as service:
        with service.session(relu()) as session, session.bind() as execution:
            execution.run()
            threads = list(threads_of(service.pid))
    assert {found[2] for found in threads} == {cpus}
    assert sorted(found[:2] for found in threads if found[1] != 20) == [
        ("fifo", 21)
    ]  # ends the service with its client
    assert len([found for found in threads if found[:2] == ("fifo", 20)]) >= 3  # also the one that serves the burst


@pytest.mark.skipif(len(CPUS) < 2, reason="one CPU")
def test_affinity_alone_needs_no_rights() -> None:
    with nnburst.launch(devices=["nnburst-noop"], affinity=CPUS[:1]) as service:
        assert {found[2] for found in threads_of(service.pid)} == {frozenset(CPUS[:1])}


@pytest.mark.skipif(len(CPUS) < 2, reason="one CPU")
def test_a_real_time_service_polls_only_beside_its_client(real_time: None) -> None:
    own, other = CPUS[:1], CPUS[1:]

    def window(seconds: float | None, peer: list[int]) -> int:
        def ask() -> int:
            Scheduling("rr", 1, frozenset(own)).apply()
            return window_ns(seconds, peer)

        return in_thread(ask)

    assert window(None, other) == window(None, CPUS) == 50_000
    assert window(0.5, other) == 500_000_000
    assert window(None, own) == window(0.5, own) == window(0.5, []) == 0
    os_window = in_thread(lambda: os.sched_setaffinity(0, own) or window_ns(0.5, own))
    assert os_window == 500_000_000  # the usual policy: what was asked for


def test_a_real_time_client_leaves_its_only_cpu_to_its_service(real_time: None) -> None:
    def run() -> int:
        Scheduling("fifo", 20, frozenset(CPUS[:1])).apply()
        with service.session(relu(), polling_window=60.0) as session, session.bind() as execution:
            for _ in range(20):
                execution.run()
            return session.stats.sleeps

    with nnburst.launch(devices=["nnburst-noop"], affinity=CPUS[:1]) as service:
        assert in_thread(run) > 10


def test_a_device_that_keeps_its_cpu_ends_with_its_client(real_time: None) -> None:
    """The thread that notices comes before the one that spins on the same CPU at the service's own priority."""
    program = (
        "import nnburst, numpy as np, os\n"
        "from nnburst.testing import inject\n"
        "from nnburst.errors import MissedDeadline\n"
        "b = nnburst.ModelBuilder()\n"
        "b.output('y', b.relu(b.input('x', nnburst.OperandType.TENSOR_FLOAT32, (4,))))\n"
        f"real_time = {{'scheduler': ('fifo', 20), 'affinity': {CPUS[-1:]}}}\n"
        "service = nnburst.launch(devices=['nnburst-noop'], faults=True, **real_time)\n"
        "session = service.session(b.build(), timeout=0.05)\n"
        "inject(service, freeze='interpreter')\n"
        "print(service.pid, flush=True)\n"
        "try:\n    session.run(None, {'x': np.zeros(4, np.float32)})\n"
        "except MissedDeadline:\n    os._exit(0)\n"
    )
    with start_python(program) as client:
        service = os.pidfd_open(int(line_of(client)))
        try:
            assert client.wait(PATIENCE) == 0
        finally:
            wait_gone(service)


GIVE_UP = """
import ctypes, os, resource, sys
if os.geteuid() == 0:
    for capability in (23, 24):  # CAP_SYS_NICE, CAP_SYS_RESOURCE; gone at the next exec
        assert ctypes.CDLL(None).prctl(24, capability, 0, 0, 0) == 0
resource.setrlimit(resource.RLIMIT_RTPRIO, (0, 0))
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.mark.check
@pytest.mark.parametrize(
    "arguments",
    [
        ["-c", "import nnburst; nnburst.launch(devices=['nnburst-noop'], scheduler=('rr', 7))"],
        ["-m", "nnburst", "serve", "--name", "refused", "--scheduler", "rr:7"],
    ],
    ids=["launch", "serve"],
)
def test_a_policy_that_is_refused_says_what_allows_it(arguments: list[str]) -> None:
    done = run_python("-c", GIVE_UP, *arguments)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    for part in ("scheduler rr:7 is refused: ", "`ulimit -r 7`", "the limit rtprio of a container", "CAP_SYS_NICE"):
        assert part in last


def test_a_cpu_that_is_not_there_is_said() -> None:
    with pytest.raises(DeviceUnavailable, match=r"affinity 4095 is refused: this process may run on CPU"):
        nnburst.launch(devices=["nnburst-noop"], affinity={4095})
    with pytest.raises(InvalidArgument, match="no CPU 4095 for this process"):
        in_thread(Scheduling.of(None, {CPUS[0], 4095}).apply)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"scheduler": "fifo"}, "give policy and priority"),
        ({"scheduler": ("fifo", True)}, "give policy and priority"),
        ({"scheduler": ("batch", 1)}, "'fifo' or 'rr'"),
        ({"scheduler": ("fifo", 100)}, "1 to 99"),
        ({"affinity": set()}, "numbers of CPUs"),
        ({"affinity": "1"}, "numbers of CPUs"),
        ({"affinity": {8192}}, "^affinity: the numbers of CPUs"),
        ({"affinity": {0, 1 << 40}}, "numbers of CPUs"),
        ({"affinity": {True}}, "numbers of CPUs"),
    ],
)
def test_options_that_make_no_sense_are_invalid_arguments(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        nnburst.launch(**given)


def test_options_of_a_process_are_read_as_they_were_given() -> None:
    given = ServiceOptions(
        devices=(np.str_("nnburst-function:call=\udcff.py:f"),),
        log_level=_level(True),
        quotas={"fds": 7},
        max_run=0.5,
        scheduling=Scheduling.of(("rr", 3), [2, 0]),
        apart=("nnburst-noop",),
    )
    assert ServiceOptions.read(str(given)) == given
    assert ServiceOptions.read(str(given), client=3).client == 3
