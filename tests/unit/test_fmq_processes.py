"""Queues and descriptors in multiprocessing children, under every start method."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
from collections.abc import Iterator
from multiprocessing import forkserver
from typing import Any

import numpy as np
import pytest

from nnburst.errors import BadState, GeneralFailure
from nnburst.fmq import MessageQueue, MQDescriptor
from support.users import in_forked_child
from support.waiting import PATIENCE

METHODS = ("fork", "spawn", "forkserver")


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> Iterator[None]:
    """multiprocessing's fork server is meant to stay; start it before any test and stop it after the last."""
    forkserver.ensure_running()
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


@pytest.fixture(params=METHODS)
def context(request: pytest.FixtureRequest) -> Any:
    return multiprocessing.get_context(request.param)


@contextlib.contextmanager
def child(context: Any, target: Any, *args: Any) -> Iterator[None]:
    """Run `target` in a child; fail unless it ends well."""
    process = context.Process(target=target, args=args)
    process.start()
    try:
        yield
    finally:
        process.join(PATIENCE)
        alive = process.is_alive()
        if alive:
            process.kill()
            process.join()
        code = process.exitcode
        process.close()
    assert not alive
    assert code == 0


def echo_attached(requests: MQDescriptor, results: MQDescriptor) -> None:
    with requests, results:
        incoming = MessageQueue.attach(requests)
        outgoing = MessageQueue.attach(results)
    with incoming, outgoing:
        outgoing.write_blocking(incoming.read_blocking(3, PATIENCE), PATIENCE)


def echo_inherited(incoming: MessageQueue, outgoing: MessageQueue) -> None:
    outgoing.write_blocking(incoming.read_blocking(3, PATIENCE), PATIENCE)


@pytest.mark.parametrize("flavour", ["descriptors", "queues"])
def test_child_of_every_start_method_echoes(context: Any, flavour: str) -> None:
    element = [("id", "u4"), ("value", "f8")]
    data = np.array([(1, 0.5), (2, 0.25), (3, 0.125)], element)
    with MessageQueue(element, 16) as requests, MessageQueue(element, 16) as results:
        if flavour == "descriptors":
            with requests.descriptor as a, results.descriptor as b, child(context, echo_attached, a, b):
                requests.write_blocking(data, PATIENCE)
                assert (results.read_blocking(3, PATIENCE) == data).all()
        else:
            with child(context, echo_inherited, requests, results):
                requests.write_blocking(data, PATIENCE)
                assert (results.read_blocking(3, PATIENCE) == data).all()


def test_closed_descriptor_and_queue_cannot_be_pickled() -> None:
    queue = MessageQueue("u1", 4)
    descriptor = queue.descriptor
    descriptor.close()
    queue.close()
    for thing in (descriptor, queue):
        with pytest.raises(BadState):
            pickle.dumps(thing)


def fork(function: Any) -> int:
    """Run `function` in a forked child, which exits with 0 if it returns."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            function()
            code = 0
        finally:
            os._exit(code)
    return pid


def test_role_may_move_to_a_forked_child_and_back() -> None:
    with MessageQueue("u1", 4, exclusive=False) as queue:
        assert queue.write([1, 2])

        def take_one_give_one() -> None:
            assert queue.read(1).tolist() == [1]
            assert queue.write([3])

        in_forked_child(take_one_give_one)
        assert queue.read(2).tolist() == [2, 3]
        assert queue.write([4, 5, 6, 7])


def test_forked_child_takes_a_role_up_where_the_parent_left_it() -> None:
    with MessageQueue("u1", 4) as queue:
        assert queue.write([1])
        assert queue.read(1) is not None
        begin, begun = os.pipe()

        def go_on() -> None:
            os.read(begin, 1)
            assert queue.write([3])
            assert queue.read(2).tolist() == [2, 3]

        pid = fork(go_on)
        assert queue.write([2])  # after the fork
        os.write(begun, b"x")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        os.close(begin)
        os.close(begun)
        with pytest.raises(GeneralFailure, match="exclusive=False"):
            queue.write([4])  # the child is the writer by now
