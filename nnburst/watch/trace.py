"""Traces of this process's runs, for Perfetto and Chrome's trace viewer.

The C core records the times when a request was sent, taken, answered and received. When a burst is closed or the
process ends, the burst's last runs are appended to the file, which is valid JSON at any time. Several processes can
share the file: the first process empties the file, and sets the environment variable `_BEGUN` for its children.
"""

from __future__ import annotations

import atexit
import fcntl
import heapq
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

import numpy as np

from .._core import ffi
from ..errors import ErrorStatus, InvalidArgument

if TYPE_CHECKING:
    from .._core._nnburst import CData

FILE_VARIABLE = "NNBURST_TRACE"
_BEGUN = "_NNBURST_TRACE_BEGUN"
_KEPT = 65536
"""Maximum number of recorded runs of a burst. Later runs replace earlier ones."""
_HEAD, _TAIL = b'{"displayTimeUnit":"ns","traceEvents":[\n', b"\n]}\n"
_TRACKS = 512
"""Maximum number of tracks of a process."""
_ENTRY = np.dtype(
    [
        *((name, np.uint64) for name in ("sent", "taken", "answered", "received", "run", "thread")),
        ("status", np.int32),
        ("together", np.uint32),
    ]
)
_log = logging.getLogger("nnburst.watch")


def begin(path: str) -> None:
    """Create an empty trace, replacing the file's content."""
    with open(path, "wb") as file:
        file.write(_HEAD + _TAIL)


def adopt(env: MutableMapping[str, str]) -> None:
    """Make processes with this environment append to the trace without emptying the file."""
    env[_BEGUN] = env[FILE_VARIABLE]


def append(path: str, events: list[dict[str, Any]]) -> None:
    """Append events to a trace. Several processes may append at the same time.

    Raises:
        InvalidArgument: The file is not a trace.
    """
    text = b",\n".join(json.dumps(event, separators=(",", ":")).encode() for event in events)
    with open(path, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        end = file.seek(0, os.SEEK_END) - len(_TAIL)
        file.seek(max(end, 0))
        if end < len(_HEAD) or file.read() != _TAIL:
            raise InvalidArgument(f"{path!r} is not a trace that nnburst began")
        file.seek(end)  # if this process is killed here, the end is missing
        file.write((b",\n" if end > len(_HEAD) else b"") + text + _TAIL)


class Recording:
    """The recording of one burst's runs."""

    def __init__(self, recorder: Recorder, number: int, label: str, service: tuple[int, str]) -> None:
        self._recorder = recorder
        self.number = number
        self.label = label
        self.service_pid, self.service_name = service
        self._entries = ffi.new("nnb_trace_entry[]", _KEPT)
        self.pointer: CData = ffi.new("nnb_trace *", {"room": _KEPT, "entries": self._entries})

    def finish(self) -> None:
        """Write the recorded runs to the file. Errors are logged, not raised. Idempotent."""
        self._recorder.finish(self)

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the trace events of the runs."""
        noted = self.pointer.noted
        entries = np.frombuffer(ffi.buffer(self._entries), _ENTRY)[: min(noted, _KEPT)]
        entries = entries[np.argsort(entries["sent"], kind="stable")]
        if not len(entries):
            return
        client, service = os.getpid(), self.service_pid
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        runs, waits, executions = (_Lanes(self._recorder.new_track) for _ in range(3))
        yield _named("process_name", client, 0, f"client {os.path.basename(sys.argv[0]) or 'python'}")
        if service != client:
            yield _named("process_name", service, 0, f"service {self.service_name}".rstrip())
        for entry in entries.tolist():
            sent, taken, answered, received, run, thread, status, together = entry
            flow = client << 31 | (self.number * 0x10000 + run) & 0x7FFFFFFF
            about = {
                "run": run,
                "model": self.label,
                "status": ErrorStatus(status).name,
                "thread": names.get(thread, thread),
            }
            if together:
                about["together"] = together
            track = runs.place(sent, received)
            yield _slice(client, track, "run", sent, received, about)
            if not sent < taken < answered < received:
                continue  # the service's times are missing or impossible
            waiting, serving = waits.place(sent, taken), executions.place(taken, answered)
            yield _slice(service, waiting, "queue", sent, taken, about)
            yield _slice(service, serving, "execute", taken, answered, about)
            yield _slice(client, track, "return", answered, received, about)
            yield _arrow("s", client, track, sent, flow)
            yield _arrow("t", service, waiting, sent, flow)
            yield _arrow("t", service, serving, taken, flow)
            yield _arrow("f", client, track, answered, flow)
        for kind, pid, lanes in (("runs", client, runs), ("queue", service, waits), ("service", service, executions)):
            for track in lanes.tracks:
                yield _named("thread_name", pid, track, f"{kind} of {self.label} [{client}]")


class _Lanes:
    """The tracks of a trace viewer, in which each run is a bar. Only runs that overlap get tracks of their own."""

    def __init__(self, new_track: Callable[[], int]) -> None:
        self._new_track = new_track
        self._busy: list[tuple[int, int]] = []  # (end, track)
        self._free: list[int] = []
        self.tracks: list[int] = []

    def place(self, start: int, end: int) -> int:
        while self._busy and self._busy[0][0] <= start:
            heapq.heappush(self._free, heapq.heappop(self._busy)[1])
        if not self._free:
            self.tracks.append(self._new_track())
            self._free.append(self.tracks[-1])
        track = heapq.heappop(self._free)
        heapq.heappush(self._busy, (end, track))
        return track


def _micros(ns: int) -> float:
    # Readers multiply by 1000 and truncate: the third of a nanosecond prevents the loss of one.
    return round(ns / 1000 + 0.0003, 4)


def _slice(pid: int, track: int, name: str, start: int, end: int, about: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X", "cat": "nnburst", "name": name, "pid": pid, "tid": track,
        "ts": _micros(start), "dur": _micros(end - start), "args": about,
    }  # fmt: skip


def _arrow(step: str, pid: int, track: int, at: int, flow: int) -> dict[str, Any]:
    return {
        "ph": step, "cat": "nnburst", "name": "run", "id": flow, "pid": pid, "tid": track, "ts": _micros(at), "bp": "e",
    }  # fmt: skip


def _named(what: str, pid: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "cat": "__metadata", "name": what, "pid": pid, "tid": track, "ts": 0, "args": {"name": name}}


class Recorder:
    """The recorder of this process's trace."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.pid = os.getpid()
        self._open: dict[int, Recording] = {}
        self._numbers = self._tracks = 0
        if os.environ.get(_BEGUN) != path:
            begin(path)
            adopt(os.environ)

    def new_track(self) -> int:
        """Return an unused thread number for a new track."""
        self._tracks += 1
        return self.pid * _TRACKS + self._tracks

    def start_recording(self, label: str, service: tuple[int, str]) -> Recording:
        """Start to record a burst of a model.

        Args:
            label: Name of the model.
            service: Process id and name of the service."""
        self._numbers += 1
        self._open[self._numbers] = recording = Recording(self, self._numbers, label, service)
        return recording

    def finish(self, recording: Recording) -> None:
        if self._open.pop(recording.number, None) is None or self.pid != os.getpid():
            return
        events = list(recording.events())
        try:
            if events:
                append(self.path, events)
        except (OSError, InvalidArgument) as error:
            _log.warning("the trace of %d runs was lost: %s", recording.pointer.noted, error)

    def finish_all(self) -> None:
        for recording in list(self._open.values()):
            self.finish(recording)


_recorder: Recorder | None = None


def recorder() -> Recorder:
    """Return this process's recorder for the file in `NNBURST_TRACE`."""
    global _recorder
    path = os.path.abspath(os.environ.get(FILE_VARIABLE, ""))
    if _recorder is None or (_recorder.pid, _recorder.path) != (os.getpid(), path):
        if _recorder is not None:
            _recorder.finish_all()
        try:
            _recorder = Recorder(path)
        except OSError as error:
            raise InvalidArgument(f"{FILE_VARIABLE}={path!r} cannot be written: {error.strerror}") from error
    return _recorder


@atexit.register
def _finish_all() -> None:
    if _recorder is not None:
        _recorder.finish_all()


assert _ENTRY.itemsize == ffi.sizeof("nnb_trace_entry")
