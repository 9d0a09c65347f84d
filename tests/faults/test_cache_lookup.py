"""What an error of a look-up says about the entry, and what becomes of the compilation."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import nnburst
from nnburst import Model
from nnburst.cache.directory import Cache
from nnburst.cache.reasons import CacheReason, CacheRejected
from nnburst.devices import Device
from nnburst.devices.interfaces import CompileJob
from nnburst.devices.reference.device import ReferenceDevice
from nnburst.devices.reference.prepared import ReferencePreparedModel
from nnburst.devices.resilient import ResilientDevice
from nnburst.errors import (
    BadState,
    DeadObject,
    DeviceUnavailable,
    GeneralFailure,
    InvalidArgument,
    MissedDeadline,
    ResourceExhausted,
)
from nnburst.model.types import DeviceStatus
from nnburst.runtime.compile.cache_sources import DirectoryCache, Job
from nnburst.runtime.compile.caching import compile_with_cache
from support.cache_worker import build
from support.waiting import until

R = CacheReason


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNBURST_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("NNBURST_CACHE", raising=False)


def compiled(device: Any, directory: Path, deadline_ns: int = 0) -> str:
    """Compile or restore, and return outcome, reason and what was refused."""
    job = Job(device, build(), CompileJob(deadline_ns=deadline_ns))
    prepared, report = compile_with_cache(job, DirectoryCache(Cache(directory), bytes(32)))
    prepared.close()
    return f"{report.outcome}/{report.reason.value}/{report.rejected.value if report.rejected else '-'}"


class Failing(ReferenceDevice):
    """Its look-ups fail, and its compilations, too, if so desired."""

    def __init__(self, load: Callable[[], Exception], compile: Exception | None = None) -> None:
        super().__init__()
        self.load, self.compile = load, compile

    def prepare_model_from_cache(self, *args: Any, **options: Any) -> Any:
        raise self.load()

    def prepare_model(self, *args: Any, **options: Any) -> Any:
        if self.compile is not None:
            raise self.compile
        return super().prepare_model(*args, **options)


PASSING: dict[str, Callable[[], Exception]] = {
    "deadline": partial(MissedDeadline, "late"),
    "quota": partial(ResourceExhausted, "too many models"),
    "busy device": partial(DeviceUnavailable, "busy"),
    "busy entry": partial(CacheRejected, R.BUSY),
    "no store": partial(CacheRejected, R.NO_STORE),
    "I/O": partial(CacheRejected, R.IO_ERROR),
    "descriptors": partial(CacheRejected, R.BAD_FD),
    "argument": partial(InvalidArgument, "no"),
    "failure": partial(GeneralFailure, "no"),
    "exception": partial(ValueError, "a bug of the device"),
}


@pytest.mark.parametrize("error", PASSING.values(), ids=PASSING.keys())
def test_entry_outlives_errors_that_say_nothing_about_it(tmp_path: Path, error: Callable[[], Exception]) -> None:
    assert compiled(ReferenceDevice(), tmp_path / "c") == "SAVED/SAVED/-"
    with pytest.raises(GeneralFailure, match="does not compile"):
        compiled(Failing(error, GeneralFailure("does not compile")), tmp_path / "c")
    assert compiled(ReferenceDevice(), tmp_path / "c") == "HIT/HIT/-"


@pytest.mark.parametrize("reason", ["BAD_MAC", "DIRTY", "ROLLED_BACK", "BAD_CONTENT", "NO_ROW", "PARTIAL_SET"])
def test_entry_that_is_spoilt_is_forgotten(tmp_path: Path, reason: str) -> None:
    assert compiled(ReferenceDevice(), tmp_path / "c") == "SAVED/SAVED/-"
    with pytest.raises(GeneralFailure):
        compiled(Failing(partial(CacheRejected, R(reason)), GeneralFailure("does not compile")), tmp_path / "c")
    assert not list((tmp_path / "c").glob("objects/*/*"))


def test_deadline_that_has_passed_costs_no_entry(tmp_path: Path) -> None:
    with nnburst.launch(devices=["nnburst-reference"]) as service:
        device = service.devices[0]
        assert compiled(device, tmp_path / "c") == "SAVED/SAVED/-"
        with pytest.raises(MissedDeadline):
            compiled(device, tmp_path / "c", time.monotonic_ns() - 1)
        assert compiled(device, tmp_path / "c") == "HIT/HIT/-"


def test_generation_that_is_not_confirmed_replaces_nothing(tmp_path: Path) -> None:
    class Forgetful(ReferenceDevice):
        def prepare_model_from_cache(self, *args: Any, **options: Any) -> Any:
            raise CacheRejected(R.BUSY)

        def confirm_cache(self, token: bytes, generation: bytes) -> bool:
            cache = self._cache.get()
            cache._store.revoke(token, cache._device, generation)
            return super().confirm_cache(token, generation)

    assert compiled(ReferenceDevice(), tmp_path / "c") == "SAVED/SAVED/-"
    assert compiled(Forgetful(), tmp_path / "c") == "REJECTED/NO_ROW/BUSY"
    assert compiled(ReferenceDevice(), tmp_path / "c") == "HIT/HIT/-"


@pytest.mark.parametrize("what", ["look-up", "save", "note"])
def test_source_with_a_bug_does_not_make_a_compilation_fail(tmp_path: Path, what: str) -> None:
    class Odd(DirectoryCache):
        def find_entries(self, job: Job) -> Any:
            if what == "look-up":
                raise ValueError("odd")
            yield from super().find_entries(job)

        def _keep(self, *args: Any) -> CacheReason:
            reason = super()._keep(*args)
            if what == "save":
                raise ValueError("odd")
            return reason

        def note(self, *args: Any) -> None:
            raise ValueError("odd")

    models = list[Model]()

    class Counting(ReferenceDevice):
        def compile(self, model: Model) -> ReferencePreparedModel:
            models.append(model)
            return super().compile(model)

    job = Job(Counting(), build(), CompileJob())
    prepared, report = compile_with_cache(job, Odd(Cache(tmp_path / "c"), bytes(32)))
    assert report.outcome == ("SAVED" if what == "note" else "NOT_SAVED")
    assert len(models) == 1
    prepared.close()


@pytest.mark.parametrize("error", [partial(OSError, errno.ENOSPC, "no space"), ValueError, MemoryError])
def test_save_that_fails_in_the_device_is_no_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Callable[[], Exception]
) -> None:
    """A disk may be full for a while: nobody stops asking because of that."""

    def packed(self: ReferencePreparedModel) -> Any:
        raise error()

    with monkeypatch.context() as patch:
        patch.setattr(ReferencePreparedModel, "pack", packed)
        assert [compiled(ReferenceDevice(), tmp_path / "c") for _ in range(5)] == ["NOT_SAVED/IO_ERROR/-"] * 5
    assert compiled(ReferenceDevice(), tmp_path / "c") == "SAVED/SAVED/-"


# ---- processes that end ---------------------------------------------------------------------------------------------


class Deadly:
    """A device whose process is killed while it restores an entry."""

    made: list[Deadly]

    def __init__(self) -> None:
        self.service = nnburst.launch(devices=["nnburst-reference"])
        self.device = self.service.devices[0]
        self.closed = 0
        type(self).made.append(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.device, name)

    def prepare_model_from_cache(self, *args: Any) -> Any:
        os.kill(self.service.pid, signal.SIGKILL)
        return self.device.prepare_model_from_cache(*args)

    def close(self) -> None:
        self.closed += 1
        self.service.close()


@pytest.fixture
def deadly() -> Iterator[Callable[[], Any]]:
    Deadly.made = []
    yield Deadly
    for device in Deadly.made:
        device.service.close()


def test_F5_F7_entry_that_kills_the_driver_is_compiled_again_and_forgotten(
    tmp_path: Path, deadly: Callable[[], Any]
) -> None:
    assert compiled(ReferenceDevice(), tmp_path / "c") == "SAVED/SAVED/-"
    (old,) = (tmp_path / "c").glob("objects/*/*")
    device = ResilientDevice(deadly)
    assert compiled(device, tmp_path / "c") == "SAVED/SAVED/DEAD_SERVICE"
    assert len(Deadly.made) == 3  # each of two processes was killed by it once
    (new,) = (tmp_path / "c").glob("objects/*/*")
    assert new != old
    device.close()
    assert [made.closed for made in Deadly.made] == [1, 1, 1]


def test_F5_service_that_cannot_be_recovered_is_dead_and_its_killer_is_gone(
    tmp_path: Path, deadly: Callable[[], Any]
) -> None:
    assert compiled(ReferenceDevice(), tmp_path / "c") == "SAVED/SAVED/-"
    with pytest.raises(DeadObject):
        compiled(deadly(), tmp_path / "c")
    assert not list((tmp_path / "c").glob("objects/*/*"))  # else every start would end so
    assert compiled(deadly(), tmp_path / "c") == "SAVED/SAVED/-"


def test_service_that_was_dead_before_does_not_cost_the_entry(tmp_path: Path) -> None:
    with nnburst.launch(devices=["nnburst-reference"]) as service:
        assert compiled(service.devices[0], tmp_path / "c") == "SAVED/SAVED/-"
        os.kill(service.pid, signal.SIGKILL)
        until(lambda: service.devices[0].status is DeviceStatus.OFFLINE)
        for _ in range(3):
            with pytest.raises(DeadObject):
                compiled(service.devices[0], tmp_path / "c")
    assert compiled(ReferenceDevice(), tmp_path / "c") == "HIT/HIT/-"


class Closing(ReferenceDevice):
    """Counts how often it is closed. The first `most` say what they are; each is of another version if so desired."""

    made: list[Closing]
    most = 9
    changes = False

    def __init__(self) -> None:
        super().__init__()
        self.closed, self.dead = 0, False
        Closing.made.append(self)

    @property
    def version_string(self) -> str:
        return str(Closing.made.index(self)) if Closing.changes else "1"

    def get_number_of_cache_files_needed(self) -> tuple[int, int]:
        if len(Closing.made) > Closing.most:
            raise GeneralFailure("cannot tell")
        return 1, 1

    def confirm_cache(self, token: bytes, generation: bytes) -> bool:
        if self.dead:
            raise DeadObject("gone")
        if self.closed:
            raise BadState("closed")
        return bool(Closing.made.index(self))

    def close(self) -> None:
        self.closed += 1
        raise OSError("nothing is left to be closed")


@pytest.fixture(autouse=True)
def none_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Closing, "made", [], raising=False)


def closed() -> list[int]:
    return [device.closed for device in Closing.made]


def test_devices_that_are_replaced_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Closing, "most", 2)
    resilient = ResilientDevice(Closing)
    Closing.made[0].dead = True
    assert resilient.confirm_cache(b"", b"")
    assert closed() == [1, 0]
    with pytest.raises(GeneralFailure, match="cannot tell"):
        resilient.recover(Closing.made[1])
    assert closed() == [1, 0, 1]
    assert resilient.confirm_cache(b"", b"")


def test_device_that_cannot_say_what_it_is_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Closing, "most", 0)
    with pytest.raises(GeneralFailure, match="cannot tell"):
        ResilientDevice(Closing)
    assert closed() == [1]


def test_device_that_comes_back_changed_is_closed_with_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Closing, "changes", True)
    resilient = ResilientDevice(Closing)
    with pytest.raises(GeneralFailure, match="another device"):
        resilient.recover(Closing.made[0])
    assert closed() == [1, 1]


def test_call_that_met_a_device_just_replaced_is_repeated() -> None:
    """Another thread found out first, and closed it between this one's asking for it and calling it."""
    resilient = ResilientDevice(Closing)
    first = Closing.made[0]

    def call(device: Device) -> Any:
        if device is first:
            resilient.recover(first)
        return device.confirm_cache(b"", b"")

    assert resilient._call(call)
    Closing.made[1].closed = 1
    with pytest.raises(BadState):  # nobody replaced it: that is an answer
        resilient.confirm_cache(b"", b"")
