"""A burst client that sends raw datums, to test servers. It is written from the table in docs/WIRE.md alone."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nnburst import Memory
from nnburst.burst.client.slots import SlotTable
from nnburst.burst.interfaces import BurstCallback, BurstContext
from nnburst.burst.polling import DATUM
from nnburst.devices import PreparedModel
from nnburst.errors import ErrorStatus
from nnburst.fmq import EventFlag, MessageQueue
from support.waiting import PATIENCE

UINT64_MAX = 2**64 - 1
Datum = bytes
"""An element of a channel: 24 bytes."""


def packet_information(size: int, inputs: int, outputs: int, pools: int) -> Datum:
    return struct.pack("<B3xIIII4x", 0, size, inputs, outputs, pools)


def operand(is_input: bool, *, no_value: bool = False, pool: int = 0, offset: int = 0, length: int = 0, rank: int = 0):
    return struct.pack("<B3xB3xIIII", 1 if is_input else 3, no_value, pool, offset, length, rank)


def dimension(is_input: bool, value: int) -> Datum:
    return struct.pack("<B3xI16x", 2 if is_input else 4, value)


def pool_identifier(slot: int) -> Datum:
    return struct.pack("<B3xi16x", 5, slot)


def measure_timing(value: int) -> Datum:
    return struct.pack("<B3xi16x", 6, value)


def sealed_size(datums: Sequence[Datum]) -> list[Datum]:
    """Return a packet with a correct packetSize. Other fields may be wrong."""
    fixed = list(datums)
    if fixed and fixed[0][0] == 0:
        fixed[0] = fixed[0][:4] + struct.pack("<I", len(fixed)) + fixed[0][8:]
    return fixed


@dataclass(frozen=True)
class Answer:
    """A decoded result packet."""

    status: int
    shapes: list[tuple[bool, tuple[int, ...]]]
    times: tuple[int, int]
    raw: bytes

    @property
    def is_bare_error(self) -> bool:
        """True if the result is an error without shapes and timing."""
        return self.status != 0 and not self.shapes and self.times == (UINT64_MAX, UINT64_MAX)


def parse_answer(raw: bytes) -> Answer:
    """Decode one result packet. Fail if it breaks a rule of the format."""
    rows = [raw[i : i + 24] for i in range(0, len(raw), 24)]
    kind, size, status, count = struct.unpack("<B7xIiI4x", rows[0])
    assert kind == 0
    assert size == len(rows)
    at, shapes = 1, []
    for _ in range(count):
        kind, sufficient, rank = struct.unpack("<B7xB3xI8x", rows[at])
        assert kind == 1
        assert rows[at][9:12] == b"\0\0\0"
        dims = tuple(struct.unpack_from("<I", row, 8)[0] for row in rows[at + 1 : at + 1 + rank])
        assert all(row[0] == 2 for row in rows[at + 1 : at + 1 + rank])
        shapes.append((bool(sufficient), dims))
        at += 1 + rank
    kind, on_device, in_driver = struct.unpack("<B7xQQ", rows[at])
    assert kind == 3
    assert at == len(rows) - 1
    return Answer(status, shapes, (on_device, in_driver), raw)


class RawBurst:
    """The client's end of both channels of a burst. Context manager."""

    def __init__(
        self,
        prepared: PreparedModel,
        callback: BurstCallback | None = None,
        *,
        request_length: int = 1024,
        result_length: int = 1024,
        polling_window: float | None = None,
    ) -> None:
        self.slots = SlotTable()
        self.requests = MessageQueue(DATUM, request_length)
        self.results = MessageQueue(DATUM, result_length)
        with self.requests.descriptor as request, self.results.descriptor as result:
            self.context: BurstContext = prepared.configure_execution_burst(
                callback or self.slots, request, result, polling_window
            )

    def send(self, *packets: Sequence[Datum]) -> None:
        """Publish packets with one store, and wake the server."""
        datums = b"".join(b"".join(packet) for packet in packets)
        elements = np.frombuffer(datums, DATUM)
        self.requests.write_blocking(elements, timeout=PATIENCE)

    def receive(self) -> Answer:
        """Wait for one result packet and return it."""
        head = self.results.read_blocking(1, timeout=PATIENCE)
        first = head.tobytes()
        rest = self.results.read(struct.unpack_from("<I", first, 8)[0] - 1)
        assert rest is not None
        return parse_answer(first + rest.tobytes())

    def ask(self, packet: Sequence[Datum]) -> Answer:
        """Send one packet. Return its answer; fail if there is a second one."""
        self.send(packet)
        answer = self.receive()
        assert self.results.available_to_read == 0
        return answer

    def wake(self) -> None:
        """Wake the server, as a write does."""
        self.requests.event_flag.wake(EventFlag.NOT_EMPTY)

    def close(self) -> None:
        self.context.close()
        self.requests.close()
        self.results.close()

    def __enter__(self) -> RawBurst:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AddRequest:
    """A pool with x at offset 0 and y at offset 64, and a request packet for `add_model`."""

    def __init__(self, burst: RawBurst) -> None:
        self.memory = Memory.ashmem(128)
        self.x = self.memory.array(np.float32, (4,), 0)
        self.y = self.memory.array(np.float32, (4,), 64)
        self.x[:] = [10, 20, 30, 40]
        (self.slot,) = burst.slots.slots_for([self.memory])

    def packet(self, *, measure: int = 0, slot: int | None = None, dims: bool = True) -> list[Datum]:
        rank = 1 if dims else 0
        datums = [packet_information(0, 1, 1, 1), operand(True, length=16, rank=rank)]
        datums += [dimension(True, 4)] * rank
        datums += [operand(False, offset=64, length=16, rank=rank)]
        datums += [dimension(False, 4)] * rank
        datums += [pool_identifier(self.slot if slot is None else slot), measure_timing(measure)]
        return sealed_size(datums)

    def works(self, burst: RawBurst) -> bool:
        """Return True if the burst still answers correctly."""
        self.y[:] = 0
        answer = burst.ask(self.packet())
        return answer.status == ErrorStatus.NONE and self.y.tolist() == [11, 22, 33, 44]

    def close(self) -> None:
        self.memory.close()
