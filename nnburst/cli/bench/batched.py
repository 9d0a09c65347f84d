"""`nnburst bench --clients N --model FILE`: rows of a model that programs share, alone and in batches, in turns."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from .clients import PATIENCE, WARM_UP, shared_service, together

HEAD = "clients   alone: rows/s   p50 µs   p99 µs   batched: rows/s   p50 µs   p99 µs   times"


@dataclass(frozen=True, slots=True)
class Rows:
    """What so many clients got, all together.

    Attributes:
        clients: Programs, each with a burst whose requests wait for others if there are batches.
        rate: Runs a second.
        p50, p99: Seconds that a run took.
    """

    clients: int
    rate: float
    p50: float
    p99: float


Pair = tuple[Rows, Rows]
"""Without batches and with them."""


def measure_rows(
    model: str,
    shapes: Mapping[str, Sequence[int]],
    numbers: Iterable[int],
    batch: int,
    wait: str,
    seconds: float,
    turns: int,
) -> Iterator[list[Pair]]:
    """Measure with some numbers of clients, each as fast as it can; yields one turn after the other.

    Args:
        shapes: Of inputs, by name; open dimensions of others are 1.
        batch: Rows that run as one, at most.
        wait: As ``nnburst serve --batch-wait`` has it.

    Raises:
        DeviceUnavailable: A service could not be started, or a client has ended.
    """
    named = ["--device", "nnburst-onnxruntime", "--model", f"model={Path(model).resolve()}"]
    with ExitStack() as stack:
        services = [
            stack.enter_context(shared_service(*named, *options))[0]
            for options in ((), ("--batch", str(batch), "--batch-wait", wait))
        ]
        for _ in range(turns):
            pairs = []
            for count in numbers:
                one, other = (_measure(address, shapes, count, seconds) for address in services)
                pairs.append((one, other))
            yield pairs


def _measure(address: str, shapes: Mapping[str, Sequence[int]], count: int, seconds: float) -> Rows:
    took = np.concatenate(together(count, seconds, partial(_client, address, shapes)))
    p50, p99 = np.percentile(took, (50, 99))
    return Rows(count, len(took) / seconds, float(p50), float(p99))


def _client(address: str, shapes: Mapping[str, Sequence[int]], end: Connection) -> None:
    from ...runtime import connect
    from ..tensors import made_up

    now = time.monotonic
    with (
        connect(address, open_timeout=PATIENCE) as service,
        service.session("model", preference="sustained_speed") as session,
    ):
        inputs = made_up(session.get_inputs(), shapes)
        execution = session.bind(shapes={name: array.shape for name, array in inputs.items()})
        for name, array in inputs.items():
            execution.inputs[name][...] = array
        execution.run()
        end.send(None)
        start, stop = end.recv()
        time.sleep(max(0.0, start - WARM_UP - now()))
        while now() < start:
            execution.run()
        took, begun = [], now()
        while begun < stop:
            execution.run()
            ended = now()
            took.append(ended - begun)
            begun = ended
        end.send(np.array(took))


def gain(pair: Pair) -> float:
    """How many times as many rows run with batches."""
    alone, batched = pair
    return batched.rate / alone.rate


def show(pair: Pair) -> str:
    alone, batched = (f"{rows.rate:15,.0f} {rows.p50 * 1e6:8.0f} {rows.p99 * 1e6:8.0f}" for rows in pair)
    return f"{pair[0].clients:7} {alone}   {batched} {gain(pair):7.2f}"


def as_json(turns: Sequence[Sequence[Pair]]) -> str:
    rows = [{"alone": asdict(alone), "batched": asdict(batched)} for pairs in turns for alone, batched in pairs]
    return json.dumps({"rows": rows}, indent=1)
