"""REQ-CACHE 021 … 051: when the runtime asks a device for what, with which files and token."""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import nnburst
from nnburst import MissedDeadline, Model, ModelBuilder, OperandType
from nnburst.cache.names import device_cache_key, model_fingerprint
from nnburst.cache.reasons import CacheReason, CacheRejected, SaveResult
from nnburst.devices import Device, PreparedModel
from nnburst.devices.interfaces import CacheFiles, CompileJob
from nnburst.devices.reference.device import ReferenceDevice
from nnburst.errors import BadState, DeviceUnavailable, GeneralFailure, InvalidArgument, NNBurstError
from nnburst.nnapi import Compilation
from support.models import compiled
from support.samples import SAMPLES

TOKEN = bytes(32)
CONTENT = b"what a device saves"


def model(constant: float = 1.0) -> Model:
    b = ModelBuilder()
    x = b.input("x", OperandType.TENSOR_FLOAT32, (2,))
    b.output("y", b.add(x, b.constant(np.full(2, constant, np.float32))))
    return b.build()


class Recorder(ReferenceDevice):
    """Does with cache files what it is told, and writes down what it was asked."""

    def __init__(self, counts: tuple[int, int] = (1, 1), load: Any = None, name: str = "test-recorder") -> None:
        self.name = name
        super().__init__()
        self.counts = counts
        self.answer = load
        self.calls: list[str] = []
        self.tokens: list[bytes] = []

    def get_number_of_cache_files_needed(self) -> tuple[int, int]:
        return self.counts

    def _checked(self, cache: CacheFiles) -> tuple[int, ...]:
        assert (len(cache.model_fds), len(cache.data_fds)) == self.counts
        fds = (*cache.model_fds, *cache.data_fds)
        for fd in fds:
            assert os.lseek(fd, 0, os.SEEK_CUR) == 0
        return fds

    def prepare_model(self, model: Model, job: CompileJob = CompileJob()) -> PreparedModel:
        self.calls.append("compile with files" if job.cache else "compile")
        prepared = super().prepare_model(model, replace(job, cache=None))
        if job.cache:
            self.tokens.append(job.cache.cache_key)
            for fd in self._checked(job.cache):
                os.ftruncate(fd, 0)
                os.pwrite(fd, CONTENT, 0)
            prepared.cache_result = SaveResult(True, CacheReason.SAVED, os.urandom(16), 1)
        return prepared

    def prepare_model_from_cache(self, cache: CacheFiles, deadline_ns: int = 0) -> PreparedModel:
        self.calls.append("load")
        for fd in self._checked(cache):
            assert os.pread(fd, 100, 0) == CONTENT
        if self.answer is not None:
            raise self.answer
        return super().prepare_model(model())

    def confirm_cache(self, token: bytes, generation: bytes) -> bool:
        return True


def finish(device: Device, directory: Any, token: bytes | None = TOKEN) -> Any:
    with Compilation(model(), [device]) as compilation:
        if token is not None:
            compilation.set_caching(directory, token)
        compilation.finish()
        return compilation.cache_report


COUNTS = [(m, d) for m in (0, 1, 32) for d in (0, 1, 32)]
ANSWERS: dict[str, NNBurstError | None] = {
    "NONE": None,
    "GENERAL_FAILURE": CacheRejected(CacheReason.BAD_MAC),
    "DEVICE_UNAVAILABLE": DeviceUnavailable("busy"),
    "INVALID_ARGUMENT": InvalidArgument("no"),
    "MISSED_DEADLINE": MissedDeadline("late"),
}


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("counts", COUNTS)
def test_REQ_CACHE_022_023_025_cache_that_does_not_exist_and_then_does(
    tmp_path: Path, counts: tuple[int, int], answer: str
) -> None:
    """Whatever a look-up brings but a model, the model is compiled, with files."""
    first, device, again = Recorder(counts), Recorder(counts, ANSWERS[answer]), Recorder(counts)
    made, report, _ = (finish(each, tmp_path) for each in (first, device, again))
    if counts == (0, 0):
        assert first.calls == device.calls == again.calls == ["compile"]
        assert (made.outcome, made.reason) == ("DISABLED", CacheReason.UNSUPPORTED)
        return
    assert (first.calls, again.calls) == (["compile with files"], ["load"])
    assert (made.outcome, made.reason) == ("SAVED", CacheReason.SAVED)
    if answer == "NONE":
        assert device.calls == ["load"]
        assert (report.outcome, report.nbytes) == ("HIT", len(CONTENT) * sum(counts))
    else:
        assert device.calls == ["load", "compile with files"]
        assert report.outcome == "SAVED"
        assert report.rejected is not None


@pytest.mark.parametrize("counts", COUNTS)
def test_REQ_CACHE_024_027_033_no_token(tmp_path: Path, counts: tuple[int, int]) -> None:
    finish(Recorder(counts), tmp_path)
    device = Recorder(counts)
    assert finish(device, tmp_path, token=None).reason is CacheReason.NO_INFO
    assert (device.calls, device.tokens) == (["compile"], [])


def test_REQ_CACHE_026_long_directory_name(tmp_path: Path) -> None:
    directory = tmp_path.joinpath(*["directory" * 20] * 6)
    directory.mkdir(parents=True, mode=0o700)
    for calls in (["compile with files"], ["load"]):
        device = Recorder((2, 1))
        finish(device, directory)
        assert device.calls == calls


def several_operations() -> Model:
    b = ModelBuilder()
    x = b.input("x", OperandType.TENSOR_FLOAT32, (2,))
    y = b.add(x, b.constant(np.ones(2, np.float32)))
    b.output("y", b.mul(y, x))
    return b.build()


BODIES = {"simple": model, "several_operations": several_operations}


def token_given(
    directory: Path,
    body: Model,
    *,
    name: str = "test-recorder",
    version: str = "1",
    epoch: bytes = bytes(32),
    counts: tuple[int, int] = (1, 1),
    token: bytes | None = TOKEN,
    preference: str = "fast_single_answer",
    priority: str = "medium",
) -> bytes:
    """Return the token that reaches a device."""

    class Device(Recorder):
        version_string = version
        cache_epoch = epoch

    device = Device(counts, name=name)
    directory.mkdir(exist_ok=True)
    with Compilation(body, [device]) as compilation:
        if token is None:
            compilation.set_caching_auto(directory)
        else:
            compilation.set_caching(directory, token)
        compilation.set_preference(preference)
        compilation.set_priority(priority)
        compilation.finish()
    (given,) = device.tokens
    return given


@pytest.mark.parametrize("body", BODIES)
def test_REQ_CACHE_028_to_038_token_of_the_device_depends_on_everything_that_counts(tmp_path: Path, body: str) -> None:
    """The parts of a model that is cut are in `test_partition.py`."""
    changes: dict[str, dict[str, Any]] = {
        "nothing": {},
        "028 034": {"name": "test-other"},
        "029 035": {"version": "2"},
        "030 036 low power": {"preference": "low_power"},
        "030 036 sustained": {"preference": "sustained_speed"},
        "031 037 low": {"priority": "low"},
        "031 037 high": {"priority": "high"},
        "032 038": {"token": bytes([1]) * 32},
        "THR-13": {"name": "test-recorder1", "version": "0"},
        "epoch": {"epoch": bytes([1]) * 32},
        "files": {"counts": (1, 2)},
    }
    built = BODIES[body]()
    tokens = {name: token_given(tmp_path / name, built, **change) for name, change in changes.items()}
    assert len(set(tokens.values())) == len(changes), tokens
    for n in range(3):
        assert token_given(tmp_path / str(n), built) == tokens["nothing"]


BASE: dict[str, Any] = {
    "device": "a-b", "version": "1", "epoch": bytes(32), "preference": 1, "priority": 100, "relaxed": False,
    "files": (1, 1),
}  # fmt: skip


def test_token_is_what_it_is() -> None:
    """Each field has its length in the digest; entries of another token would never be found again."""
    digest = hashlib.sha256()
    fields: list[tuple[bytes, bytes]] = [
        (b"label", b"nnburst-token-v2"), (b"app", TOKEN), (b"device", b"a-b"), (b"version", b"1"),
        (b"epoch", bytes(32)), (b"preference", struct.pack("<i", 1)), (b"priority", struct.pack("<i", 100)),
        (b"relaxed", b"\0"), (b"files", struct.pack("<II", 1, 1)),
    ]  # fmt: skip
    for name, value in fields:
        digest.update(struct.pack("<HQ", len(name), len(value)) + name + value)
    assert device_cache_key(TOKEN, **BASE) == digest.digest()
    assert device_cache_key(TOKEN, **{**BASE, "relaxed": True}) != digest.digest()


@pytest.mark.parametrize("how", ["default", "explicit"])
def test_REQ_CACHE_049_arguments_that_are_missing(how: str, tmp_path: Path) -> None:
    with nnburst.in_process() as service:
        compilation = Compilation(model(), service if how == "default" else service.devices)
        for directory, token in (
            (None, TOKEN),
            (tmp_path, None),
            (tmp_path, b"short"),
            (tmp_path, "x" * 32),
            (1.5, TOKEN),
        ):
            with pytest.raises(InvalidArgument):
                compilation.set_caching(directory, token)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument):
            compilation.set_caching_from_fds([987654], [], TOKEN)
        with pytest.raises(BadState):
            _ = compilation.cache_report
        compilation.finish()
        assert compilation.cache_report.outcome == "DISABLED"
        compilation.close()


@pytest.mark.parametrize("how", ["default", "explicit"])
def test_REQ_CACHE_050_after_finish(how: str, tmp_path: Path) -> None:
    with nnburst.in_process() as service:
        with compiled(model(), service if how == "default" else service.devices) as compilation:
            for late in (
                lambda: compilation.set_caching(tmp_path, TOKEN),
                lambda: compilation.set_caching_auto(tmp_path),
                lambda: compilation.set_caching_from_fds([], [], TOKEN),
            ):
                with pytest.raises(BadState):
                    late()


def test_last_call_counts(tmp_path: Path) -> None:
    device = Recorder()
    with Compilation(model(), [device]) as compilation:
        compilation.set_caching(tmp_path / "first", TOKEN)
        compilation.set_caching(tmp_path / "second", TOKEN)
        compilation.finish()
    assert not (tmp_path / "first").exists()
    assert (tmp_path / "second" / "objects").is_dir()


@pytest.mark.parametrize("good", [True, False])
def test_files_that_the_caller_has_open(tmp_path: Path, good: bool) -> None:
    fds = [os.open(tmp_path / f"{i}", os.O_RDWR | os.O_CREAT, 0o600) for i in range(2)]
    for calls in (["compile with files"], ["load"]):
        device = Recorder()
        with Compilation(model(), [device]) as compilation:
            compilation.set_caching_from_fds(fds[:1], fds[1:] if good else [], TOKEN)
            compilation.finish()
            assert compilation.cache_report.reason is not CacheReason.BAD_FD or not good
        assert device.calls == (calls if good else ["compile"])
        assert not good or set(device.tokens) <= {TOKEN}
    for fd in fds:
        os.close(fd)  # still ours


@pytest.mark.parametrize("how", ["finished", "failed", "replaced", "turned off"])
def test_duplicates_of_descriptors_are_closed_when_they_are_not_needed_any_more(tmp_path: Path, how: str) -> None:
    class Broken(Recorder):
        def prepare_model(self, *args: Any, **kwargs: Any) -> Any:
            raise GeneralFailure("does not compile")

    fds = [os.open(tmp_path / f"{i}", os.O_RDWR | os.O_CREAT, 0o600) for i in range(2)]
    device = Broken() if how == "failed" else Recorder()
    compilation = Compilation(model(), [device])
    before = set(os.listdir("/proc/self/fd"))
    compilation.set_caching_from_fds(fds[:1], fds[1:], TOKEN)
    assert len(os.listdir("/proc/self/fd")) == len(before) + 2
    if how in ("finished", "failed"):
        with contextlib.suppress(GeneralFailure):
            compilation.finish()
    elif how == "replaced":
        compilation.set_caching(tmp_path / "c", TOKEN)
    else:
        compilation._set_cache_source(None)
    assert set(os.listdir("/proc/self/fd")) == before
    compilation.close()
    for fd in fds:
        os.close(fd)


def test_F11_error_of_the_compiler_is_the_error(tmp_path: Path) -> None:
    class Broken(Recorder):
        def prepare_model(self, *args: Any, **kwargs: Any) -> Any:
            raise GeneralFailure("does not compile")

    with pytest.raises(GeneralFailure, match="does not compile"):
        finish(Broken(), tmp_path / "c")
    assert not list((tmp_path / "c" / "staging").iterdir())


def test_F4_F9_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        device = Recorder()
        report = finish(device, place)
        assert device.calls == ["compile"]
        assert report.outcome == "NOT_SAVED"


def test_environment_turns_caching_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNBURST_CACHE", "0")
    device = Recorder()
    report = finish(device, tmp_path)
    assert (report.outcome, report.reason) == ("DISABLED", CacheReason.DISABLED)
    assert device.calls == ["compile"]
    assert not list(tmp_path.iterdir())


def test_token_from_the_model_knows_its_constants(tmp_path: Path) -> None:
    assert model_fingerprint(model(1)) != model_fingerprint(model(2))
    assert model_fingerprint(model(1)) == model_fingerprint(model(1))
    assert model_fingerprint(model(1), constants=False) == model_fingerprint(model(2), constants=False)
    seen = []
    for constant in (1.0, 2.0, 1.0):
        device = Recorder()
        with Compilation(model(constant), [device]) as compilation:
            compilation.set_caching_auto(tmp_path)
            compilation.finish()
        seen.append(device.calls)
    assert seen == [["compile with files"], ["compile with files"], ["load"]]


def test_all_samples_have_fingerprints_of_their_own() -> None:
    prints = {name: model_fingerprint(make().model) for name, make in SAMPLES.items()}
    assert len(set(prints.values())) == len(prints)


# ---- with the real device, over a process boundary ----------------------------------------------------------------


@pytest.fixture(params=["in_process", pytest.param("child", marks=pytest.mark.check)])
def start(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("NNBURST_STATE_DIR", str(tmp_path / "state"))
    return nnburst.in_process if request.param == "in_process" else nnburst.launch


@pytest.mark.parametrize("token", [None, TOKEN])
def test_model_is_compiled_once_and_then_restored(start: Any, tmp_path: Path, token: bytes | None) -> None:
    b = ModelBuilder()
    y = b.input("x", OperandType.TENSOR_FLOAT32, (1, 700))
    for seed in range(3):
        weights = np.random.default_rng(seed).normal(size=(700, 700)).astype(np.float32)
        y = b.fully_connected(y, weights / 30, activation="relu")
    b.output("y", y)
    built = b.build()
    x = np.ones((1, 700), np.float32)
    found, reports = [], []
    for _ in range(3):
        with start() as service, Compilation(built, service.devices) as compilation:
            if token is None:
                compilation.set_caching_auto(tmp_path / "c")
            else:
                compilation.set_caching(tmp_path / "c", token)
            compilation.finish()
            reports.append(compilation.cache_report)
            execution, y = nnburst.nnapi.Execution(compilation), np.empty((1, 700), np.float32)
            execution.set_input(0, x)
            execution.set_output(0, y)
            execution.compute()
            found.append(y)
    assert [report.outcome for report in reports] == ["SAVED", "HIT", "HIT"]
    assert all((y == found[0]).all() for y in found)


@pytest.mark.parametrize(
    ("value", "said"), [(True, "cache_encrypt=True, but nothing is cached: give cache_dir="), ("yes", "True or")]
)
def test_encryption_of_the_cache_needs_a_cache(value: Any, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        nnburst.Session(model(), cache_encrypt=value)


def test_session_restores_only_the_kind_of_entry_that_it_asks_for(start: Any, tmp_path: Path) -> None:
    def report(built: Model, *, encrypt: bool) -> tuple[str, CacheReason | None]:
        options = {"cache_dir": tmp_path / "c", "cache_encrypt": encrypt}
        with start() as service, service.session(built, **options) as session:
            assert session.run(None, {"x": np.ones(2, np.float32)})[0][0] > 1
            return session.cache_report.outcome, session.cache_report.rejected

    first, second = model(), model(2.0)
    assert [report(first, encrypt=True) for _ in range(2)] == [("SAVED", None), ("HIT", None)]
    assert [report(second, encrypt=False) for _ in range(2)] == [("SAVED", None), ("HIT", None)]
    assert [report(first, encrypt=False) for _ in range(2)] == [("SAVED", CacheReason.OTHER_CIPHER), ("HIT", None)]
    assert [report(first, encrypt=True) for _ in range(2)] == [("SAVED", CacheReason.OTHER_CIPHER), ("HIT", None)]
    assert report(second, encrypt=False) == ("HIT", None)
    files = [path for path in (tmp_path / "c" / "objects").glob("*/*/*.*") if path.is_file()]
    assert sorted(path.read_bytes()[18] for path in files) == [0, 0, 1, 1]  # the older ones are gone


def test_what_a_device_did_not_encrypt_is_not_kept(tmp_path: Path) -> None:
    with Compilation(model(), [Recorder()]) as compilation:
        compilation.set_caching(tmp_path / "c", TOKEN, encrypt=True)
        compilation.finish()
        assert (compilation.cache_report.outcome, compilation.cache_report.reason) == (
            "NOT_SAVED",
            CacheReason.DECLINED,
        )
    assert not list((tmp_path / "c").glob("objects/*/*"))
    assert not list((tmp_path / "c").glob("staging/*"))


def test_two_directories_keep_one_model_each(start: Any, tmp_path: Path) -> None:
    """Each has a newest entry of its own."""

    def outcome(directory: Path) -> str:
        directory.mkdir(exist_ok=True)
        with start() as service, Compilation(model(), service.devices) as compilation:
            compilation.set_caching(directory, TOKEN)
            compilation.finish()
            return compilation.cache_report.outcome

    one, two = tmp_path / "one", tmp_path / "two"
    assert [outcome(place) for place in (one, two, one, two, one)] == ["SAVED", "SAVED", "HIT", "HIT", "HIT"]


def test_THR_12_token_that_is_used_for_two_models(start: Any, tmp_path: Path) -> None:
    outcomes = []
    for constant in (1.0, 2.0):
        with start() as service, Compilation(model(constant), service.devices) as compilation:
            compilation.set_caching(tmp_path / "c", TOKEN)
            compilation.finish()
            outcomes.append((compilation.cache_report.outcome, compilation.cache_report.rejected))
    assert outcomes == [("SAVED", None), ("SAVED", CacheReason.OTHER_MODEL)]
