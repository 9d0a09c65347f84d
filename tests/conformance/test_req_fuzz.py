"""REQ-FUZZ-001: whatever a peer writes into a queue's memory, no crash and no over-read.

Runs in a child process each, so that a crash is a failed test and not the end of the test run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from nnburst._core._nnburst import lib
from nnburst.errors import NNBurstError
from nnburst.fmq import MessageQueue, MQDescriptor

SECONDS = 1.5
PAGE = 4096
U64 = (1 << 64) - 1
COUNTERS = (0, 1, 7, 8, 4095, 4096, U64, U64 - 7, 1 << 63, (1 << 63) - 8)

# The data region is surrounded by guard bytes: an access beyond it changes them (writes) or returns them (reads).
GUARD = 0xEE


def random_counter(rng: np.random.Generator) -> int:
    if rng.random() < 0.5:
        return COUNTERS[rng.integers(len(COUNTERS))]
    return int(rng.integers(0, 1 << int(rng.integers(1, 64)), dtype=np.uint64))


def storm(rng: np.random.Generator, queues: list[MessageQueue]) -> None:
    """A few random operations on a random queue while the counters jump about."""

    def forge() -> None:
        victim = queues[rng.integers(len(queues))]
        if rng.random() < 0.3 and not victim.read_only:
            where = lib.nnb_mq_write_counter if rng.random() < 0.5 else lib.nnb_mq_read_counter
            where(victim.handle)[0] = random_counter(rng)

    for _ in range(12):
        queue = queues[rng.integers(len(queues))]
        n = int(rng.integers(0, queue.capacity + 2))
        if n > 100_000:
            continue
        data = np.full(n * queue.quantum, rng.integers(0, 128), np.uint8).tobytes()
        forge()
        try:
            match rng.integers(0, 8):
                case 0:
                    queue.write(data)
                case 1:
                    if (read := queue.read(n)) is not None:
                        assert GUARD not in read.tobytes(), "read beyond the ring"
                case 2:
                    if (tx := queue.begin_write(n)) is not None:
                        forge()
                        tx.copy_to(np.frombuffer(data, np.uint8).view(queue.dtype))
                        forge()
                        tx.commit()
                case 3:
                    if (tx := queue.begin_read(n)) is not None:
                        forge()
                        assert GUARD not in tx.copy_from().tobytes(), "read beyond the ring"
                        tx.commit()
                case 4:
                    queue.write_blocking(data, 1e-4)
                case 5:
                    assert GUARD not in queue.read_blocking(n, 1e-4).tobytes(), "read beyond the ring"
                case 6:
                    assert 0 <= queue.available_to_read
                case 7:
                    assert 0 <= queue.available_to_write
        except NNBurstError:
            pass


def memory(rng: np.random.Generator, size: int) -> int:
    fd = os.memfd_create("fuzz")
    os.write(fd, bytes([GUARD]) * size)
    return fd


def plausible_layout(rng: np.random.Generator, quantum: int) -> list[tuple[int, int, int, int]]:
    """Counters, ring and event word in an order and at distances of the hostile peer's choice."""
    sizes = [8, 8, quantum * int(rng.integers(1, 40)), 4]
    grantors: dict[int, tuple[int, int, int, int]] = {}
    offset = 0
    for index in rng.permutation(4):
        offset += 8 * int(rng.integers(0, 4))
        grantors[index] = (0, 0, offset, sizes[index])
        offset += -(-sizes[index] // 8) * 8
    return [grantors[i] for i in range(4)]


def random_layout(rng: np.random.Generator, quantum: int) -> list[tuple[int, int, int, int]]:
    """Any numbers at all, or a good layout with a few fields changed and grantors missing."""
    if rng.random() < 0.3:
        return [
            tuple(int(rng.integers(0, limit)) for limit in (1, 3, PAGE + 64, PAGE + 64))
            for _ in range(int(rng.integers(0, 5)))
        ]
    layout = [list(g) for g in plausible_layout(rng, quantum)]
    for _ in range(int(rng.integers(0, 3))):
        field = int(rng.integers(1, 4))
        value = int(rng.integers(0, 3)) if field == 1 else int(rng.integers(0, PAGE // 8 + 8)) * 8
        layout[int(rng.integers(0, 4))][field] = value
    return [tuple(g) for g in layout[: int(rng.integers(2, 5))]]


def check_guards(fd: int, grantors: list[tuple[int, int, int, int]]) -> None:
    content = np.frombuffer(os.pread(fd, PAGE, 0), np.uint8)
    outside = np.ones(PAGE, bool)
    for _, _, offset, extent in grantors:
        outside[offset : offset + extent] = False
    assert (content[outside] == GUARD).all(), "wrote outside of its regions"


def fuzz(seed: int, mode: str, seconds: float) -> int:
    """Run until the time is over; return how many queues were opened."""
    rng = np.random.default_rng(seed)
    end = time.monotonic() + seconds
    opened = 0
    while time.monotonic() < end:
        quantum = int(rng.choice([1, 2, 3, 4, 8, 24]))
        grantors = plausible_layout(rng, quantum) if mode == "counters" else random_layout(rng, quantum)
        fds = [memory(rng, PAGE) for _ in range(1 if mode == "counters" else int(rng.integers(1, 3)))]
        with MQDescriptor(grantors, fds, quantum, int(rng.integers(1, 3))) as descriptor:
            queues: list[MessageQueue] = []
            try:
                reset = bool(rng.random() < 0.7) or mode == "counters"
                exclusive = bool(rng.random() < 0.3)
                queues.append(MessageQueue.attach(descriptor, reset=reset, exclusive=exclusive))
                for _ in range(int(rng.integers(0, 6))):
                    queues.append(MessageQueue.attach(descriptor))
            except NNBurstError:
                pass
            if queues:
                opened += 1
                # Only readers of the ring's own bytes can tell whether a guard byte came from outside.
                g = descriptor.grantors[lib.NNB_GRANTOR_DATA]
                os.pwrite(fds[g.fd_index], bytes(g.extent), g.offset)
                storm(rng, queues)
            for queue in queues:
                queue.close()
            if mode == "counters":
                check_guards(fds[0], grantors)
    return opened


@pytest.mark.parametrize("mode", ["counters", "grantors"])
def test_REQ_FUZZ_001_hostile_memory_never_crashes(mode: str) -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), str(seed), mode, str(SECONDS)], capture_output=True, text=True
    )
    assert done.returncode == 0, f"seed {seed}: exit {done.returncode}\n{done.stderr}"
    assert int(done.stdout) > 10, f"seed {seed}: hardly any queue was opened, the fuzzer is blind"


if __name__ == "__main__":
    print(fuzz(int(sys.argv[1]), sys.argv[2], float(sys.argv[3])))
