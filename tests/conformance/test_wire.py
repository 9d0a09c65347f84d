"""REQ-WIRE: what a server does with packets, right and wrong, in process and across processes."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import pytest

import nnburst
from nnburst import Memory, Model
from nnburst.devices import PreparedModel
from nnburst.errors import ErrorStatus
from support.models import add_model, open_model
from support.raw_burst import (
    UINT64_MAX,
    AddRequest,
    RawBurst,
    dimension,
    measure_timing,
    operand,
    packet_information,
    pool_identifier,
    sealed_size,
)


@pytest.fixture(scope="module", params=["in_process", pytest.param("child", marks=pytest.mark.check)])
def service(request: pytest.FixtureRequest) -> Iterator[nnburst.Service]:
    with (nnburst.in_process if request.param == "in_process" else nnburst.launch)() as service:
        # Once through everything: threads that a connection starts at first use are there before a test begins.
        prepared = prepare(service, add_model())
        with RawBurst(prepared) as burst:
            request = AddRequest(burst)
            assert request.works(burst)
            request.close()
        prepared.close()
        yield service


@pytest.fixture(params=[0.0, 50e-6], ids=["futex", "polling"])
def window(request: pytest.FixtureRequest) -> float:
    return request.param


def prepare(service: nnburst.Service, model: Model) -> PreparedModel:
    return service.devices[0].prepare_model(model)


@pytest.fixture
def burst(service: nnburst.Service, window: float) -> Iterator[RawBurst]:
    prepared = prepare(service, add_model())
    with RawBurst(prepared, polling_window=window) as burst:
        yield burst
    prepared.close()


@pytest.fixture
def request_(burst: RawBurst) -> Iterator[AddRequest]:
    request = AddRequest(burst)
    yield request
    request.close()


BAD_DATUMS = {
    "packet": packet_information(10, 10, 10, 10),
    "input": operand(True, rank=10),
    "input_dim": dimension(True, 0),
    "output": operand(False, rank=10),
    "output_dim": dimension(False, 0),
    "pool": pool_identifier(2**31 - 1),
    "measure": measure_timing(1),
}


def open_packet(slot: int, *, room: int, measure: int) -> list[bytes]:
    """A request of `open_model` for three rows, with so many bytes for its output."""
    return sealed_size(
        [
            packet_information(0, 1, 1, 1),
            operand(True, length=24, rank=2),
            dimension(True, 3),
            dimension(True, 2),
            operand(False, offset=1024, length=room),
            pool_identifier(slot),
            measure_timing(measure),
        ]
    )


@pytest.mark.representative
def test_REQ_WIRE_valid_packet_runs(burst: RawBurst, request_: AddRequest) -> None:
    assert request_.works(burst)
    assert burst.ask(request_.packet(dims=False)).status == ErrorStatus.NONE


@pytest.mark.representative
@pytest.mark.parametrize("fixed_size", [False, True], ids=["as_is", "size_fixed_up"])
def test_REQ_WIRE_001_removed_datum_gives_one_error(burst: RawBurst, request_: AddRequest, fixed_size: bool) -> None:
    whole = request_.packet()
    for i in range(len(whole)):
        mutant = whole[:i] + whole[i + 1 :]
        answer = burst.ask(sealed_size(mutant) if fixed_size else mutant)
        assert answer.is_bare_error, f"datum {i} removed"
    assert request_.works(burst)


@pytest.mark.parametrize("fixed_size", [False, True], ids=["as_is", "size_fixed_up"])
@pytest.mark.parametrize("bad", BAD_DATUMS)
def test_REQ_WIRE_002_added_datum_gives_one_error(
    burst: RawBurst, request_: AddRequest, bad: str, fixed_size: bool
) -> None:
    whole = request_.packet()
    for i in range(len(whole) + 1):
        mutant = [*whole[:i], BAD_DATUMS[bad], *whole[i:]]
        answer = burst.ask(sealed_size(mutant) if fixed_size else mutant)
        assert answer.is_bare_error, f"{bad} at {i}"
    assert request_.works(burst)


@pytest.mark.parametrize("bad", BAD_DATUMS)
def test_REQ_WIRE_003_mutated_datum_gives_one_error(burst: RawBurst, request_: AddRequest, bad: str) -> None:
    whole = request_.packet()
    datum = BAD_DATUMS[bad]
    for i, old in enumerate(whole):
        same_kind_of_dimension = datum[0] == old[0] and datum[0] in (2, 4)
        if old == datum or same_kind_of_dimension or (datum[0] == old[0] == 6):
            continue
        answer = burst.ask([*whole[:i], datum, *whole[i + 1 :]])
        assert answer.is_bare_error, f"datum {i} became {bad}"
    assert request_.works(burst)


@pytest.mark.parametrize("discriminant", [7, 8, 100, 255])
def test_REQ_WIRE_unknown_discriminant_is_refused(burst: RawBurst, request_: AddRequest, discriminant: int) -> None:
    whole = request_.packet()
    for i in range(len(whole)):
        mutant = [*whole[:i], bytes([discriminant]) + whole[i][1:], *whole[i + 1 :]]
        assert burst.ask(mutant).is_bare_error, f"datum {i}"
    assert request_.works(burst)


@pytest.mark.parametrize("count", [11, 1023, 1024, 2**16, 2**31, 2**32 - 1])
@pytest.mark.parametrize("field", [4, 8, 12, 16])
def test_REQ_WIRE_huge_counts_are_refused(burst: RawBurst, request_: AddRequest, field: int, count: int) -> None:
    whole = request_.packet()
    head = whole[0][:field] + struct.pack("<I", count) + whole[0][field + 4 :]
    assert burst.ask([head, *whole[1:]]).is_bare_error
    rank = whole[1][:20] + struct.pack("<I", count)
    assert burst.ask([whole[0], rank, *whole[2:]]).is_bare_error
    assert request_.works(burst)


@pytest.mark.parametrize("byte", [2, 0xFF])
def test_REQ_WIRE_booleans_and_enums_out_of_range_are_refused(burst: RawBurst, request_: AddRequest, byte: int) -> None:
    whole = request_.packet()
    flag = whole[1][:4] + bytes([byte]) + whole[1][5:]
    assert burst.ask([whole[0], flag, *whole[2:]]).is_bare_error
    assert burst.ask([*whole[:-1], measure_timing(byte)]).is_bare_error
    assert request_.works(burst)


@pytest.mark.representative
@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, 0), (0, 15), (0, 17), (120, 16), (2**32 - 16, 16), (2**32 - 1, 2**32 - 1), (0, 2**32 - 1)],
)
def test_REQ_WIRE_regions_outside_the_pool_are_refused(
    burst: RawBurst, request_: AddRequest, offset: int, length: int
) -> None:
    for which in (1, 3):
        datums = request_.packet()
        datums[which] = operand(which == 1, offset=offset, length=length, rank=1)
        assert burst.ask(datums).is_bare_error
    assert request_.works(burst)


def test_REQ_WIRE_pool_index_beyond_the_pools_is_refused(burst: RawBurst, request_: AddRequest) -> None:
    for pool in (1, 2**31, 2**32 - 1):
        datums = request_.packet()
        datums[1] = operand(True, pool=pool, length=16, rank=1)
        assert burst.ask(datums).status == ErrorStatus.INVALID_ARGUMENT
    assert request_.works(burst)


def test_REQ_WIRE_004_result_that_does_not_fit_becomes_general_failure(service: nnburst.Service, window: float) -> None:
    prepared = prepare(service, open_model())
    with Memory.ashmem(4096) as memory:
        for length, status, shapes in ((4, ErrorStatus.GENERAL_FAILURE, 0), (1024, ErrorStatus.NONE, 1)):
            with RawBurst(prepared, result_length=length, polling_window=window) as burst:
                (slot,) = burst.slots.slots_for([memory])
                packet = open_packet(slot, room=24, measure=0)
                answer = burst.ask(packet)
                assert answer.status == status
                assert len(answer.shapes) == shapes
                assert answer.times == (UINT64_MAX, UINT64_MAX)
    prepared.close()


def test_REQ_WIRE_005_padding_of_results_is_zero(service: nnburst.Service) -> None:
    prepared = prepare(service, open_model())
    with RawBurst(prepared) as burst, Memory.ashmem(4096) as memory:
        memory.buffer[:] = b"\xff" * 4096
        (slot,) = burst.slots.slots_for([memory])
        packet = open_packet(slot, room=8, measure=1)
        raw = burst.ask(packet).raw  # too small an output: a packet with every kind of datum
        rows = [raw[i : i + 24] for i in range(0, len(raw), 24)]
        assert [row[0] for row in rows] == [0, 1, 2, 2, 3]
        assert all(row[1:8] == bytes(7) for row in rows)
        assert rows[0][20:] == bytes(4)
        assert rows[1][9:12] == bytes(3)
        assert rows[1][16:] == bytes(8)
        assert all(row[12:] == bytes(12) for row in rows[2:4])
    prepared.close()


@pytest.mark.parametrize("measure", [0, 1])
def test_REQ_WIRE_006_timing_only_when_measured(burst: RawBurst, request_: AddRequest, measure: int) -> None:
    answer = burst.ask(request_.packet(measure=measure))
    assert answer.status == ErrorStatus.NONE
    on_device, in_driver = answer.times
    if not measure:
        assert answer.times == (UINT64_MAX, UINT64_MAX)
    elif UINT64_MAX not in answer.times:
        assert on_device <= in_driver


def test_REQ_WIRE_006_open_outputs_report_complete_shapes(service: nnburst.Service, window: float) -> None:
    prepared = prepare(service, open_model())
    with RawBurst(prepared, polling_window=window) as burst, Memory.ashmem(4096) as memory:
        (slot,) = burst.slots.slots_for([memory])
        x = memory.array(np.float32, (3, 2))
        x[:] = np.arange(6).reshape(3, 2)
        for room, status in ((24, ErrorStatus.NONE), (23, ErrorStatus.OUTPUT_INSUFFICIENT_SIZE)):
            packet = open_packet(slot, room=room, measure=0)
            answer = burst.ask(packet)
            assert answer.status == status
            assert answer.shapes == [(room == 24, (3, 2))]
        assert (memory.array(np.float32, (3, 2), 1024) == x + 1).all()
    prepared.close()


def test_REQ_WIRE_two_packets_in_one_publication_get_two_answers(burst: RawBurst, request_: AddRequest) -> None:
    burst.send(request_.packet(), request_.packet(measure=1), request_.packet(slot=77))
    answers = [burst.receive() for _ in range(3)]
    assert [a.status for a in answers] == [ErrorStatus.NONE, ErrorStatus.NONE, ErrorStatus.INVALID_ARGUMENT]
    assert burst.results.available_to_read == 0
