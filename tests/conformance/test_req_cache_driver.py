"""REQ-CACHE 001 … 020: what a device does with cache files; what it believes of them is in `test_cache_device.py`."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import nnburst
from nnburst.cache.reasons import CacheReason
from nnburst.devices import Device, PreparedModel
from nnburst.devices.caching import DeviceCacheHome
from nnburst.devices.interfaces import CacheFiles, CompileJob
from nnburst.devices.reference.device import ReferenceDevice
from nnburst.devices.registry import create_device
from nnburst.errors import ErrorStatus, InvalidArgument, NNBurstError, ResourceExhausted
from nnburst.service.host.quotas import Quotas
from support.samples import SAMPLES, Sample, check_outputs, run
from support.services import in_process
from support.users import as_user

TOKEN = bytes(range(32))
COUNTS = (1, 1)
every_kind = pytest.mark.parametrize("kind", ["float32", "quant8"])
SAMPLE = {"float32": "conv_large_constant", "quant8": "quant_chain"}


@pytest.fixture(scope="module", params=["in_process", pytest.param("child", marks=pytest.mark.check)])
def device(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    before = os.environ.get("NNBURST_STATE_DIR")
    os.environ["NNBURST_STATE_DIR"] = str(tmp_path_factory.mktemp("state") / "nnburst")
    try:
        with (nnburst.in_process if request.param == "in_process" else nnburst.launch)() as service:
            yield service.devices[0]
    finally:
        del os.environ["NNBURST_STATE_DIR"]
        if before is not None:
            os.environ["NNBURST_STATE_DIR"] = before


class Files:
    """The files of one entry."""

    def __init__(self, directory: Path, name: str = "a") -> None:
        self.paths = [directory / f"{name}.{kind}" for kind in ("model", "data")]

    @contextmanager
    def open(self, flags: Sequence[int] | None = None, counts: tuple[int, int] = COUNTS) -> Iterator[list[list[int]]]:
        """Descriptors per kind: more than one for a count above 1, none for 0."""
        fds: list[list[int]] = [[], []]
        for i, path in enumerate(self.paths):
            path.touch(0o600)
            for _ in range(counts[i]):
                fds[i].append(os.open(path, os.O_RDWR if flags is None else flags[i]))
        try:
            yield fds
        finally:
            for fd in fds[0] + fds[1]:
                os.close(fd)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def sample(kind: str) -> Sample:
    return SAMPLES[SAMPLE[kind]]()


def check(prepared: PreparedModel, sample: Sample) -> None:
    for way in ("sync", "burst"):
        check_outputs(sample, run(prepared, sample.model, sample.inputs, [a.shape for a in sample.outputs], way))
    prepared.close()


def save(device: Device, sample: Sample, files: Files, token: bytes = TOKEN, **options: Any) -> PreparedModel:
    with files.open(**options) as fds:
        return device.prepare_model(sample.model, CompileJob(cache=CacheFiles(*fds, token)))


def load(device: Device, files: Files, token: bytes = TOKEN, **options: Any) -> PreparedModel:
    with files.open(**options) as fds:
        return device.prepare_model_from_cache(CacheFiles(*fds, token))


def fails(device: Device, files: Files, *args: Any, **options: Any) -> ErrorStatus:
    with pytest.raises(NNBurstError) as error:
        load(device, files, *args, **options)
    assert error.value.status in (ErrorStatus.INVALID_ARGUMENT, ErrorStatus.GENERAL_FAILURE)
    return error.value.status


GF = ErrorStatus.GENERAL_FAILURE


def test_REQ_CACHE_001_057_numbers_of_files(device: Device) -> None:
    counts = device.get_number_of_cache_files_needed()
    assert counts == COUNTS
    assert all(0 <= count <= 32 for count in counts)


def test_REQ_CACHE_002_003_device_that_does_not_cache(files: Files) -> None:
    device = create_device("nnburst-noop")
    assert device.get_number_of_cache_files_needed() == (0, 0)
    assert fails(device, files) is GF
    with nnburst.launch(devices=["nnburst-noop"]) as service:
        assert service.devices[0].get_number_of_cache_files_needed() == (0, 0)
        assert fails(service.devices[0], files) is GF


@pytest.mark.representative
@every_kind
def test_REQ_CACHE_003_saved_and_retrieved(
    device: Device, files: Files, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = sample(kind)
    prepared = save(device, one, files)
    assert prepared.cache_result is not None
    assert prepared.cache_result.saved
    check(prepared, one)
    monkeypatch.setattr(ReferenceDevice, "compile", None)  # neither validated nor lowered nor transformed
    check(load(device, files), one)


@pytest.mark.parametrize("counts", [(2, 1), (0, 1), (1, 2), (1, 0)])
@every_kind
def test_REQ_CACHE_005_to_008_019_wrong_numbers_of_files(
    device: Device, files: Files, kind: str, counts: tuple[int, int]
) -> None:
    """A handle has one descriptor here, so one with two or none is one file too many or too few."""
    one = sample(kind)
    for _ in range(2):
        prepared = save(device, one, files, counts=counts)
        assert prepared.cache_result is not None
        assert prepared.cache_result.reason is CacheReason.BAD_FD
        check(prepared, one)
        fails(device, files, counts=counts)
    check(save(device, one, files), one)
    fails(device, files, counts=counts)
    check(load(device, files), one)


@pytest.mark.parametrize("which", [0, 1])
@every_kind
def test_REQ_CACHE_009_019_save_to_a_read_only_file(device: Device, files: Files, kind: str, which: int) -> None:
    one = sample(kind)
    flags = [os.O_RDWR, os.O_RDWR]
    flags[which] = os.O_RDONLY
    for _ in range(2):
        check(save(device, one, files, flags=flags), one)
        fails(device, files, flags=flags)
    assert all(path.stat().st_size == 0 for path in files.paths)


@pytest.mark.representative
@pytest.mark.parametrize("seed", range(10))
@every_kind
def test_REQ_CACHE_018_020_wrong_token(device: Device, files: Files, kind: str, seed: int) -> None:
    one = sample(kind)
    save(device, one, files).close()
    token, generator = bytearray(TOKEN), random.Random(seed)
    token[generator.randrange(32)] ^= 1 << generator.randrange(8)
    assert fails(device, files, bytes(token)) is GF
    check(save(device, one, files, bytes(token)), one)  # as one would go on
    check(load(device, files, bytes(token)), one)


@pytest.mark.parametrize("length", [1, 31, 33])
def test_token_of_another_length_is_an_argument_of_its_own(device: Device, files: Files, length: int) -> None:
    one = sample("float32")
    with files.open() as fds:
        with pytest.raises(InvalidArgument):
            device.prepare_model(one.model, CompileJob(cache=CacheFiles(*fds, bytes(length))))
        with pytest.raises(InvalidArgument):
            device.prepare_model_from_cache(CacheFiles(*fds, bytes(length)))


def test_real_hit_survives_the_end_of_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNBURST_STATE_DIR", str(tmp_path / "state"))
    one, files = sample("float32"), Files(tmp_path)
    with nnburst.launch() as service:
        check(save(service.devices[0], one, files), one)
    with nnburst.launch() as service:
        check(load(service.devices[0], files), one)


@pytest.mark.parametrize("name", SAMPLES)
def test_REQ_CACHE_051_every_sample_is_the_same_when_restored(device: Device, files: Files, name: str) -> None:
    one = SAMPLES[name]()
    check(save(device, one, files), one)
    check(load(device, files), one)


def test_forked_child_saves_and_loads_as_its_parent_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNBURST_STATE_DIR", str(tmp_path / "state"))
    home = DeviceCacheHome("test-fork", lambda: bytes(32), 1, 1)
    files = Files(tmp_path)

    def save_and_load(number: int) -> bool:
        with files.open() as fds:
            saved = home.save(CacheFiles(*fds, bytes([number]) * 32), lambda: ((b"m",), (b"d",))).saved
            return saved and bytes(home.get().load(bytes([number]) * 32, *fds).data[0]) == b"d"

    assert save_and_load(1)
    assert as_user(None, lambda: save_and_load(2)) == "True"
    assert save_and_load(3)


def test_THR_21_private_copies_count_against_the_quota(files: Files) -> None:
    """A huge sparse file is refused before anything of it is read, and the model is compiled."""
    reference = create_device("nnburst-reference")
    with in_process([reference], quotas=Quotas(mapped_bytes=1 << 20)) as (client, _), files.open() as fds:
        os.truncate(files.paths[1], 1 << 40)
        with pytest.raises(ResourceExhausted):
            client.devices[0].prepare_model_from_cache(CacheFiles(*fds, TOKEN))
        client.devices[0].prepare_model(sample("float32").model).close()
