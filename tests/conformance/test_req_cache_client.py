"""REQ-CACHE 021, 041 … 048, 052 … 100: what a client makes of a device that errs, dies, or comes back changed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import nnburst
from nnburst import Model
from nnburst.cache.reasons import CacheReason, CacheRejected
from nnburst.devices import Device, PreparedModel
from nnburst.devices.interfaces import CacheFiles, CompileJob
from nnburst.devices.reference.device import ReferenceDevice
from nnburst.devices.resilient import ResilientDevice, check_device
from nnburst.errors import (
    BadState,
    DeadObject,
    DeviceUnavailable,
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    MissedDeadline,
    NNBurstError,
)
from nnburst.model import Capabilities
from nnburst.model.extensions import Extension
from nnburst.model.types import BufferDesc, BufferRole, DeviceType
from nnburst.service.host.host import ServiceHost
from support.caches import TOKEN, cache_files
from support.models import relu
from support.services import in_process
from support.waiting import Background, until


class Fake(ReferenceDevice):
    """Says and does what it is told; counts how often it is asked."""

    name, version_string, type, capabilities = "test-fake", "1", DeviceType.CPU, Capabilities()
    cache_epoch = bytes(32)
    extensions: tuple[Extension, ...] = ()

    def __init__(self, counts: Any = (1, 1), **said: Any) -> None:
        super().__init__()
        self.__dict__ |= said
        self.counts = counts
        self.asked: list[str] = []
        self.fails: NNBurstError | None = None
        self.result: Any = "model"

    def _did(self, what: str) -> None:
        self.asked.append(what)
        if self.fails is not None:
            raise self.fails

    def get_supported_extensions(self) -> tuple[Extension, ...]:
        return self.extensions

    def get_number_of_cache_files_needed(self) -> tuple[int, int]:
        self.asked.append("counts")
        if isinstance(self.counts, Exception):
            raise self.counts
        return self.counts  # type: ignore[no-any-return]

    def get_supported_operations(self, model: Model) -> tuple[bool, ...]:
        self._did("supported")
        return super().get_supported_operations(model)

    def prepare_model(self, model: Model, *args: Any, **options: Any) -> Any:
        self._did("compile")
        return super().prepare_model(model) if self.result == "model" else self.result

    def prepare_model_from_cache(self, *args: Any) -> Any:
        self._did("load")
        return super().prepare_model(relu((2,))) if self.result == "model" else self.result


# ---- registration ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [None, DeviceUnavailable("busy"), ValueError("odd")], ids=["NONE", "DU", "transport"])
@pytest.mark.parametrize("counts", [(m, d) for m in (0, 1, 32, 33, -1) for d in (0, 1, 32, 33)])
def test_REQ_CACHE_021_041_042_043_044_052_to_055_057_device_that_may_be_offered(counts: Any, error: Any) -> None:
    """One that may not is left out; the others of the service are not affected."""
    device, good = Fake(error or counts), Fake(name="test-good")
    fine = error is None and all(0 <= count <= 32 for count in counts)
    if fine:
        check_device(device)
        assert ResilientDevice(lambda: device).get_number_of_cache_files_needed() == counts
    else:
        with pytest.raises(GeneralFailure):
            check_device(device)
        with pytest.raises(GeneralFailure):
            ResilientDevice(lambda: device)
    host = ServiceHost([device, good])
    assert host.devices == ((device, good) if fine else (good,))
    host.close()


def test_REQ_CACHE_056_device_that_is_dead_while_it_is_registered() -> None:
    with pytest.raises(DeadObject):
        ResilientDevice(lambda: Fake(DeadObject("gone")))


def test_REQ_CACHE_047_048_058_080_metadata_are_asked_once() -> None:
    """One version of the interface exists here; 045 and 046 are about older ones, which have no caching."""
    device = Fake((32, 32))
    resilient = ResilientDevice(lambda: device)
    asked = len(device.asked)
    for _ in range(3):
        assert resilient.get_number_of_cache_files_needed() == (32, 32)
        assert (resilient.name, resilient.version_string, resilient.type) == ("test-fake", "1", DeviceType.CPU)
        assert resilient.capabilities == Capabilities()
        assert resilient.get_supported_extensions() == ()
    assert len(device.asked) == asked


@pytest.mark.parametrize("devices", ["nnburst-noop", "nnburst-reference"])
def test_REQ_CACHE_045_046_058_counts_come_with_the_list_of_devices(devices: str) -> None:
    with nnburst.launch(devices=[devices]) as service:
        expected = {"nnburst-noop": (0, 0), "nnburst-reference": (1, 1)}[devices]
        assert service.devices[0].get_number_of_cache_files_needed() == expected
        os.kill(service.pid, signal.SIGKILL)
        assert service.devices[0].get_number_of_cache_files_needed() == expected  # nobody was asked again


# ---- calls ----------------------------------------------------------------------------------------------------------

Call = Callable[[Device, CacheFiles], PreparedModel]
CALLS: dict[str, Call] = {
    "REQ_CACHE_059_to_065_085_to_088_prepare_model": lambda device, files: device.prepare_model(relu((2,))),
    "REQ_CACHE_066_to_072_081_to_084_from_cache": lambda device, files: device.prepare_model_from_cache(files),
    "REQ_CACHE_073_to_079_with_files": lambda device, files: device.prepare_model(relu((2,)), CompileJob(cache=files)),
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
FILES = CacheFiles((0,), (0,), TOKEN)
OFF = DeviceUnavailable("it does not start")
SCRIPTS: dict[str, tuple[list[Any], type[Exception] | None, int]] = {
    "success": (["model"], None, 1),
    "a failure": ([GeneralFailure("no")], GeneralFailure, 1),
    "busy": ([DeviceUnavailable("busy")], DeviceUnavailable, 1),
    "rejected": ([CacheRejected(CacheReason.BAD_MAC)], CacheRejected, 1),
    "no model and no error": ([None], GeneralFailure, 1),
    "dead, and cannot be connected again": ([DeadObject("gone"), OFF], DeadObject, 1),
    "dead, and connected again": ([DeadObject("gone"), "model"], None, 2),
    "dead again": ([DeadObject("gone"), DeadObject("gone")], DeadObject, 2),
}
"""What the devices do that are connected one after the other; what comes of the call; how many were asked."""


@every_call
@pytest.mark.parametrize("script", SCRIPTS)
def test_only_death_connects_again_and_once(call: Call, script: str) -> None:
    answers, expected, count = SCRIPTS[script]
    made: list[Fake] = []
    left = iter(answers)

    def connect() -> Device:
        answer = next(left, "model")
        if answer is OFF:
            raise OFF
        made.append(Fake())
        made[-1].fails, made[-1].result = (answer, None) if isinstance(answer, NNBurstError) else (None, answer)
        return made[-1]

    resilient = ResilientDevice(connect)
    if expected is None:
        assert call(resilient, FILES) is not None
    else:
        with pytest.raises(expected) as found:
            call(resilient, FILES)
        assert answers[-1] in (None, OFF, found.value)  # as it was raised
    assert [len([what for what in device.asked if what != "counts"]) for device in made] == [1] * count
    assert resilient.current is made[-1]
    made[-1].fails, made[-1].result = None, "model"
    assert call(resilient, FILES) is not None  # nothing is broken for good
    made[-1].fails = DeadObject("gone later")
    assert call(resilient, FILES) is not None
    assert len(made) == count + 1


def test_REQ_CACHE_089_090_091_recovery() -> None:
    made: list[Fake] = []
    works = True

    def connect() -> Device:
        if not works:
            raise DeviceUnavailable("no")
        made.append(Fake())
        return made[-1]

    resilient = ResilientDevice(connect)
    assert resilient.recover(made[0]) is made[1]
    works = False
    with pytest.raises(DeviceUnavailable):
        resilient.recover(made[1])
    works = True
    second = resilient.recover(made[1])
    assert resilient.recover(made[1]) is second  # somebody else had done it
    assert len(made) == 3


def test_REQ_CACHE_091_threads_that_find_out_together_connect_once() -> None:
    made: list[Fake] = []
    both = threading.Barrier(4)

    class Dying(Fake):
        def prepare_model(self, model: Model, *args: Any, **options: Any) -> Any:
            if self is made[0]:
                both.wait(30)
                raise DeadObject("gone")
            return super().prepare_model(model)

    def connect() -> Device:
        made.append(Dying())
        return made[-1]

    resilient = ResilientDevice(connect)
    calls = [Background(lambda: resilient.prepare_model(relu((2,)))) for _ in range(4)]
    assert all(isinstance(call.result(), PreparedModel) for call in calls)
    assert len(made) == 2


CHANGES: dict[str, dict[str, Any]] = {
    "REQ_CACHE_092_name": {"name": "test-other"},
    "REQ_CACHE_093_version": {"version_string": "2"},
    "REQ_CACHE_094_build": {"cache_epoch": b"x" * 32},  # a feature level is one of many things that the build decides
    "REQ_CACHE_095_type": {"type": DeviceType.GPU},
    "REQ_CACHE_096_extensions": {"extensions": (Extension("org.example", ()),)},
    "REQ_CACHE_097_capabilities": {"capabilities": ReferenceDevice().capabilities},
    "counts": {"counts": (2, 1)},
}


@pytest.mark.parametrize("change", CHANGES)
def test_REQ_CACHE_098_099_100_device_that_comes_back_changed_is_invalid(change: str) -> None:
    options = iter([{}, CHANGES[change], {}])
    made: list[Fake] = []

    def connect() -> Device:
        made.append(Fake(**next(options)))
        return made[-1]

    resilient = ResilientDevice(connect)
    made[0].fails = DeadObject("gone")
    for call in CALLS.values():
        with pytest.raises(GeneralFailure, match="another device"):
            call(resilient, FILES)
    with pytest.raises(GeneralFailure):
        resilient.allocate(BufferDesc(), [], [BufferRole(0, 0)], [])
    assert (resilient.name, resilient.version_string) == ("test-fake", "1")  # frozen
    assert len(made) == 2
    assert "compile" not in made[1].asked
    resilient.close()
    with pytest.raises(BadState):
        resilient.prepare_model(relu((2,)))


# ---- across a connection --------------------------------------------------------------------------------------------


@pytest.fixture
def remote() -> Iterator[tuple[Fake, Device]]:
    """A device behind the control plane, and what the client sees of it."""
    device = Fake()
    with in_process([device]) as (client, host):
        yield device, client.devices[0]
        (hosted,) = host.connections
        until(lambda: not hosted.ledger.used["models"] and not hosted.ledger.used["mapped_bytes"])


@pytest.fixture
def files(tmp_path: Path) -> Iterator[CacheFiles]:
    with cache_files(tmp_path) as files:
        yield files


@pytest.mark.parametrize(
    "call",
    [*CALLS.values(), lambda device, files: device.get_supported_operations(relu((2,)))],
    ids=[*CALLS, "supported"],
)
@pytest.mark.parametrize(
    "error",
    [
        GeneralFailure("the reason"),
        DeviceUnavailable("busy"),
        InvalidArgument("operand 3: scale must be positive"),
        MissedDeadline("late", status=ErrorStatus.MISSED_DEADLINE_PERSISTENT),
    ],
    ids=lambda error: type(error).__name__,
)
def test_error_of_a_device_crosses_the_connection(
    remote: tuple[Fake, Device], files: CacheFiles, call: Any, error: NNBurstError
) -> None:
    device, proxy = remote
    device.fails = error
    with pytest.raises(type(error), match=str(error)) as found:
        call(proxy, files)
    assert found.value.status is error.status
    assert len([what for what in device.asked if what != "counts"]) == 1  # nothing was tried again
    device.fails = None
    assert call(proxy, files) is not None


@every_call
def test_no_model_and_no_error_is_a_general_failure_across_the_connection(
    remote: tuple[Fake, Device], files: CacheFiles, call: Any
) -> None:
    device, proxy = remote
    device.result = None
    with pytest.raises(GeneralFailure):
        call(proxy, files)


@pytest.mark.parametrize("reason", [R for R in CacheReason if R.value.startswith("BAD_")])
def test_REQ_CACHE_067_reason_of_a_rejection_crosses_the_connection(
    remote: tuple[Fake, Device], files: CacheFiles, reason: CacheReason
) -> None:
    device, proxy = remote
    device.fails = CacheRejected(reason, "why")
    with pytest.raises(CacheRejected, match=rf"^why \[{reason.value}\]$") as found:
        proxy.prepare_model_from_cache(files)
    assert found.value.reason is reason
    assert found.value.status is ErrorStatus.GENERAL_FAILURE


# ---- real processes -------------------------------------------------------------------------------------------------


@pytest.mark.check
def test_REQ_CACHE_084_files_are_restored_by_the_next_process(
    files: CacheFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NNBURST_STATE_DIR", str(tmp_path / "state"))
    with nnburst.launch(devices=["nnburst-reference"], restart=True) as service:
        device = service.devices[0]
        os.kill(service.pid, signal.SIGKILL)
        prepared = device.prepare_model(relu((2,)), CompileJob(cache=files))
        assert prepared.cache_result is not None
        assert prepared.cache_result.saved
        os.kill(service.pid, signal.SIGKILL)
        device.prepare_model_from_cache(files).close()
