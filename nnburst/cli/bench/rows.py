"""Every row, in the order of the table, which is also the order inside a round."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatch
from functools import partial

from .burst import BURST_CASES, PAYLOAD_CASES
from .case import Bench, Case, Subject
from .flights import FLIGHT_CASES
from .peers import PEERS, Peer
from .sampling import line_samples, time_calls
from .server import server_process


@contextmanager
def _open_line(bench: Bench) -> Iterator[Subject]:
    yield Subject(partial(line_samples, bench.cpus))


@contextmanager
def _open_peer(peer: Peer, bench: Bench) -> Iterator[Subject]:
    with ExitStack() as stack:
        ours, theirs = peer.link(bench.directory)
        process = stack.enter_context(server_process(peer.server, theirs))
        if theirs is not ours and hasattr(theirs, "close"):
            theirs.close()
        call = stack.enter_context(peer.client(ours))
        call()
        process.park()
        # Unparked before the client lets go: closing may need an answer.
        stack.callback(process.unpark)
        yield Subject(partial(time_calls, call), process.pid, process.park, process.unpark)


def _peer_case(peer: Peer) -> Case:
    return Case(
        peer.key,
        "e",
        peer.title,
        peer.wait,
        peer.payload_bytes,
        partial(_open_peer, peer),
        peer.placement,
        peer.module,
        peer.distribution,
    )


def all_cases() -> tuple[Case, ...]:
    """Return every row. Rows that are compared with each other stand close together."""
    line = Case("line", "a", "L: one cache line, C", "poll", 8, _open_line)
    return (line, *BURST_CASES, *FLIGHT_CASES, *map(_peer_case, PEERS), *PAYLOAD_CASES)


def select(cases: tuple[Case, ...], patterns: tuple[str, ...]) -> tuple[Case, ...]:
    """Return the rows whose key or group matches any of the patterns (``*`` allowed), or all of them for none."""
    if not patterns:
        return cases
    return tuple(c for c in cases if any(fnmatch(c.key, p) or c.group == p for p in patterns))
