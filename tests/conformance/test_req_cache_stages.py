"""Compiling at the first execution, and in two stages, with files that are written later."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nnburst
from nnburst.cache import CacheReason, CacheRejected
from nnburst.devices import CacheFiles, CompileJob, Device, DeviceCacheHome, create_device
from nnburst.devices.deferred_save import DeferredSave
from nnburst.errors import DeviceUnavailable, InvalidArgument
from nnburst.model import Model, ModelBuilder, OperandType
from support.waiting import until

SIZE = 200
WEIGHTS = np.random.default_rng(3).normal(size=(SIZE, SIZE)).astype(np.float32)
X = np.linspace(-1, 1, SIZE, dtype=np.float32)[None]


def model() -> Model:
    b = ModelBuilder()
    b.output("y", b.fully_connected(b.input("x", OperandType.TENSOR_FLOAT32, (1, SIZE)), WEIGHTS))
    return b.build()


def deferred_save(home: DeviceCacheHome, models: list[int], data: list[int]) -> DeferredSave:
    return DeferredSave(home, CacheFiles(tuple(models), tuple(data), bytes(32)))


@pytest.fixture(params=["in_process", pytest.param("child", marks=pytest.mark.check)])
def start(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.setenv("NNBURST_STATE_DIR", str(tmp_path / "state"))
    make = nnburst.in_process if request.param == "in_process" else nnburst.launch
    return lambda options: make(devices=[f"nnburst-reference:{options}"])


def open_session(service: Any, directory: Path) -> nnburst.Session:
    session: nnburst.Session = service.session(model(), cache_dir=directory)
    return session


def run(session: nnburst.Session, times: int = 1) -> None:
    for _ in range(times):
        np.testing.assert_allclose(session.run(None, {"x": X})[0], X @ WEIGHTS.T, atol=1e-4)


def counted(device: Device, **wanted: int) -> dict[str, int]:
    """Wait until there are so many, and return all that is counted."""
    until(lambda: all(device.counters()[name] >= number for name, number in wanted.items()), device.counters)
    return dict(device.counters())


def data_file(directory: Path) -> Path:
    (path,) = directory.glob("objects/*/*/data.00")
    return path


def test_jit_compiles_and_saves_with_the_first_execution(start: Any, tmp_path: Path) -> None:
    directory = tmp_path / "c"
    with start("compilation=jit") as service, open_session(service, directory) as session:
        assert (session.cache_report.outcome, session.cache_report.reason) == ("NOT_SAVED", CacheReason.LATER)
        assert session.device.counters()["saves"] == 0
        assert data_file(directory).stat().st_size == 0
        run(session)
        counted(session.device, saves=1)
        run(session, 3)
        assert session.device.counters()["saves"] == 1
    with start("compilation=jit") as service, open_session(service, directory) as session:
        assert session.cache_report.outcome == "HIT"
        run(session, 3)
        counters = session.device.counters()
        assert (counters["loads"], counters["saves"]) == (1, 0)


def test_jit_that_never_ran_is_compiled_again(start: Any, tmp_path: Path) -> None:
    for _ in range(2):
        with start("compilation=jit") as service, open_session(service, tmp_path / "c") as session:
            assert session.cache_report.reason is CacheReason.LATER
            assert session.cache_report.rejected in (None, CacheReason.DIRTY, CacheReason.NO_ROW)


def test_multistage_saves_at_once_and_better_later(start: Any, tmp_path: Path) -> None:
    directory = tmp_path / "c"
    with start("compilation=multistage,after=4") as service, open_session(service, directory) as session:
        assert session.cache_report.outcome == "SAVED"
        first = data_file(directory).read_bytes()
        run(session, 3)
        assert session.device.counters()["saves"] == 1
        run(session)
        counted(session.device, saves=2)
        assert data_file(directory).read_bytes() != first  # in place of the old generation
    with start("compilation=multistage,after=4") as service, open_session(service, directory) as session:
        assert session.cache_report.outcome == "HIT"
        run(session, 10)
        assert session.device.counters()["saves"] == 0  # it is the last stage


def test_restored_early_stage_goes_on(start: Any, tmp_path: Path) -> None:
    directory = tmp_path / "c"
    with start("compilation=multistage,after=2") as service, open_session(service, directory) as session:
        run(session)
    with start("compilation=multistage,after=2") as service, open_session(service, directory) as session:
        assert session.cache_report.outcome == "HIT"
        run(session, 2)
        counters = counted(session.device, saves=1)
        assert (counters["loads"], counters["validations"]) == (1, 0)


def test_both_stages_are_answers_for_the_same_token(start: Any, tmp_path: Path) -> None:
    directory = tmp_path / "c"
    with start("compilation=multistage") as service, open_session(service, directory) as session:
        run(session)
    with start("compilation=ahead") as service, open_session(service, directory) as session:
        assert session.cache_report.outcome == "HIT"
        run(session)


def test_entry_that_was_removed_meanwhile_is_left_alone(start: Any, tmp_path: Path) -> None:
    directory = tmp_path / "c"
    with start("compilation=jit") as service:
        with open_session(service, directory) as session:
            for path in directory.glob("objects/*/*/*"):
                path.unlink()
            run(session, 2)
        assert service.devices[0].counters()["saves"] == 0  # a model is closed once its later stage has ended


# ---- locks ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DeviceCacheHome:
    monkeypatch.setenv("NNBURST_STATE_DIR", str(tmp_path / "state"))
    return DeviceCacheHome("test-late", lambda: bytes(32), 1, 1)


@pytest.fixture
def fds(tmp_path: Path) -> Iterator[list[int]]:
    opened = [os.open(tmp_path / name, os.O_RDWR | os.O_CREAT, 0o600) for name in ("model", "data")]
    yield opened
    for fd in opened:
        os.close(fd)


def payload(n: int) -> tuple[tuple[bytes], tuple[bytes]]:
    return (b"%d" % n,), (b"%d" % n * 50_000,)


def test_late_writes_race_a_hundred_loaders(home: DeviceCacheHome, fds: list[int]) -> None:
    """A loader gets one whole generation, or a rejection: nothing in between, and nobody waits."""
    stop, saved = threading.Event(), []

    def write() -> None:
        n = 0
        while not stop.is_set():
            n += 1
            late = deferred_save(home, fds[:1], fds[1:])
            saved.append(late.save(lambda n=n: payload(n)).saved)  # type: ignore[misc]

    thread = threading.Thread(target=write)
    thread.start()
    reasons = set()
    try:
        until(lambda: saved)
        for _ in range(100):
            try:
                entry = home.get().load(bytes(32), fds[:1], fds[1:])
            except CacheRejected as error:
                reasons.add(error.reason)
                continue
            number = int(bytes(entry.model[0]))
            assert (bytes(entry.model[0]), bytes(entry.data[0])) == (payload(number)[0][0], payload(number)[1][0])
    finally:
        stop.set()
        thread.join()
    assert all(saved)
    assert reasons <= {
        CacheReason.NO_ROW, CacheReason.BUSY, CacheReason.DIRTY, CacheReason.ROLLED_BACK, CacheReason.BAD_LENGTH,
        CacheReason.BAD_MAC,
    }  # fmt: skip
    entry = home.get().load(bytes(32), fds[:1], fds[1:])
    assert bytes(entry.model[0]) == b"%d" % len(saved)


def test_writer_holds_a_lock(home: DeviceCacheHome, fds: list[int], tmp_path: Path) -> None:
    again = [os.open(tmp_path / name, os.O_RDWR) for name in ("model", "data")]  # as a client does for each call
    late = deferred_save(home, fds[:1], fds[1:])
    seen: list[CacheReason] = []

    def payloads() -> Any:
        """Called while the lock is held."""
        for attempt in (
            lambda: home.get().load(bytes(32), again[:1], again[1:]),
            lambda: seen.append(deferred_save(home, again[:1], again[1:]).save(lambda: payload(2)).reason),
        ):
            try:
                attempt()
            except CacheRejected as error:
                seen.append(error.reason)
        return payload(1)

    home.get().save(bytes(32), *payload(0), fds[:1], fds[1:])
    assert late.save(payloads).saved
    assert seen == [CacheReason.BUSY, CacheReason.BUSY]
    assert bytes(home.get().load(bytes(32), fds[:1], fds[1:]).model[0]) == b"1"
    for fd in again:
        os.close(fd)


def test_descriptors_that_cannot_be_used_are_a_reason(home: DeviceCacheHome, fds: list[int]) -> None:
    assert deferred_save(home, [987654], fds[1:]).save(lambda: payload(1)).reason is CacheReason.BAD_FD
    assert deferred_save(home, fds, fds[1:]).save(lambda: payload(1)).reason is CacheReason.BAD_FD
    assert deferred_save(home, fds[:1], fds[1:]).save(lambda: None).reason is CacheReason.DECLINED


READ_ONLY = {"read only": os.O_RDONLY, "write only": os.O_WRONLY, "append": os.O_RDWR | os.O_APPEND}


@pytest.mark.parametrize("flags", READ_ONLY.values(), ids=READ_ONLY.keys())
def test_THR_16_late_save_does_not_widen_what_a_descriptor_allows(
    home: DeviceCacheHome, fds: list[int], tmp_path: Path, flags: int
) -> None:
    """The service may be allowed to write what its client may only read."""
    (tmp_path / "victim").write_text("precious")
    victim = os.open(tmp_path / "victim", flags)
    late = deferred_save(home, [victim], fds[1:])
    assert late.refused is CacheReason.BAD_FD
    assert late.save(lambda: payload(1)).reason is CacheReason.BAD_FD
    assert (tmp_path / "victim").read_text() == "precious"
    os.close(victim)


def test_THR_16_flags_that_change_before_the_late_save(home: DeviceCacheHome, fds: list[int], tmp_path: Path) -> None:
    late = deferred_save(home, fds[:1], fds[1:])
    assert late.refused is None
    fcntl.fcntl(fds[0], fcntl.F_SETFL, os.O_APPEND)
    assert late.save(lambda: payload(1)).reason is CacheReason.BAD_FD
    assert (tmp_path / "model").stat().st_size == 0


@pytest.mark.parametrize("how", ["jit", "multistage,after=1"])
def test_THR_16_files_that_may_only_be_read_stay_as_they_are(start: Any, tmp_path: Path, how: str) -> None:
    victims = [tmp_path / "victim1", tmp_path / "victim2"]
    for victim in victims:
        victim.write_text("precious")
    with start(f"compilation={how}") as service:
        fds = [os.open(victim, os.O_RDONLY) for victim in victims]
        device = service.devices[0]
        prepared = device.prepare_model(
            model(), CompileJob(cache=CacheFiles(tuple(fds[:1]), tuple(fds[1:]), bytes(32)))
        )
        assert prepared.cache_result is not None
        assert prepared.cache_result.reason is CacheReason.BAD_FD
        with nnburst.Compilation(model(), service.devices) as compilation:
            compilation.set_caching_from_fds(fds[:1], fds[1:], bytes(32))
            compilation.finish()
            execution, y = nnburst.Execution(compilation), np.empty((1, SIZE), np.float32)
            execution.set_input(0, X)
            execution.set_output(0, y)
            execution.compute()
        assert device.counters()["saves"] == 0
        prepared.close()
        for fd in fds:
            os.close(fd)
    assert [victim.read_text() for victim in victims] == ["precious"] * 2


@pytest.mark.parametrize("options", ["compilation=never", "after=0", "after=x", "compilation=jit,after=-1", "other=1"])
def test_options_that_do_not_exist(options: str) -> None:
    with pytest.raises((InvalidArgument, DeviceUnavailable)):
        create_device(f"nnburst-reference:{options}")
