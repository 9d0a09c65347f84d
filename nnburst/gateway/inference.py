"""Inference requests over gRPC and REST: checks, run, answer."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .._core.deadline import Deadline
from ..errors import (
    BadState,
    DeadObject,
    DeviceUnavailable,
    InvalidArgument,
    MissedDeadline,
    NNBurstError,
    ResourceExhausted,
)
from ..model.types import Array, Priority
from .models import Models, NoSuchModel, OpenedModel
from .regions import Regions, RegisteredRegion
from .tensors import bytes_of, convert_in_thread, text_size, to_wire

CODES: tuple[tuple[type[NNBurstError], str, int], ...] = (
    (NoSuchModel, "NOT_FOUND", 404),
    (InvalidArgument, "INVALID_ARGUMENT", 400),
    (BadState, "ALREADY_EXISTS", 400),
    (MissedDeadline, "DEADLINE_EXCEEDED", 504),
    (ResourceExhausted, "RESOURCE_EXHAUSTED", 429),
    (DeviceUnavailable, "UNAVAILABLE", 503),
    (DeadObject, "UNAVAILABLE", 503),
    (NNBurstError, "INTERNAL", 400),
)
"""The gRPC and HTTP status of each type of error."""


class RegionPlace(NamedTuple):
    """The place of a tensor in a registered region of shared memory."""

    region: str
    byte_size: int
    offset: int = 0

    @classmethod
    def of(cls, parameters: Mapping[str, Any], kind: str, name: str) -> RegionPlace | None:
        """Return the place that a tensor's parameters describe; None for a tensor outside shared memory.

        Raises:
            InvalidArgument: The parameters are invalid.
        """
        region = parameters.get("shared_memory_region")
        if region is None:
            return None
        size, offset = parameters.get("shared_memory_byte_size"), parameters.get("shared_memory_offset", 0)
        if not isinstance(region, str) or type(size) is not int or type(offset) is not int:
            raise InvalidArgument(f"{kind} {name!r}: a region needs a name and a size in bytes, got {dict(parameters)}")
        return cls(region, size, offset)


class InputTensor(NamedTuple):
    """An input tensor: its elements, or their place in shared memory."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes | memoryview | Sequence[Any] | Array | RegionPlace

    @classmethod
    def of(
        cls,
        name: str,
        datatype: str,
        shape: Sequence[int],
        parameters: Mapping[str, Any],
        raw: bytes | memoryview | None,
        elements: Sequence[Any] | Array | None,
    ) -> InputTensor:
        """Return a request's input: in a region, as raw bytes, or as elements.

        Raises the same errors as `RegionPlace.of`.
        """
        data: Any = RegionPlace.of(parameters, "input", name) if parameters else None
        data = raw if data is None else data
        if data is not None and elements is not None and len(elements):
            raise InvalidArgument(f"input {name!r} comes twice, as elements and as bytes or in a region; send it once")
        data = elements if data is None else data
        if data is None:
            raise InvalidArgument(f"input {name!r} has no data")
        return cls(name, datatype, tuple(shape), data)


class OutputTensor(NamedTuple):
    """A requested output."""

    name: str
    place: RegionPlace | None = None

    @classmethod
    def of(cls, name: str, parameters: Mapping[str, Any]) -> OutputTensor:
        """Return the output that parameters describe. Raises the same errors as `RegionPlace.of`."""
        if parameters.get("classification"):
            raise InvalidArgument(f"output {name!r}: classification is not served; sort the scores yourself")
        return cls(name, RegionPlace.of(parameters, "output", name))


class Terms(NamedTuple):
    """The priority and time limit of a request.

    Attributes:
        timeout: Longest duration of the run in seconds; None if the client sets no limit.
    """

    timeout: float | None = None
    priority: Priority = Priority.MEDIUM

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> Terms:
        """Return the priority and time limit in a request's parameters (the protocol's schedule extension).

        Raises:
            InvalidArgument: The parameters are invalid, or make the request part of a sequence of requests.
        """
        if not parameters:
            return _USUAL
        for name in ("sequence_id", "sequence_start", "sequence_end"):
            if parameters.get(name):
                raise InvalidArgument(f"{name}: sequences are not served; send the state along as inputs and outputs")
        timeout, priority = (parameters.get(name, 0) for name in ("timeout", "priority"))
        for name, value in (("timeout", timeout), ("priority", priority)):
            if type(value) is not int or not 0 <= value < 1 << 64:
                raise InvalidArgument(f"{name} is a whole number from 0 to {(1 << 64) - 1}, 0 for none, got {value!r}")
        return cls(timeout / 1e6 if timeout else None, _PRIORITIES.get(priority, Priority.LOW))


_USUAL = Terms()
_PRIORITIES = {0: Priority.MEDIUM, 1: Priority.HIGH, 2: Priority.MEDIUM}
"""Priorities by the protocol's numbers: 0 is the default, 1 the highest; numbers above 2 are low."""


class Inference(NamedTuple):
    """A request to run a model.

    Attributes:
        inputs, outputs: The tensors, in any order. If `outputs` is empty, the client requests all outputs.
        size: Bytes of the JSON, or of a gRPC message without raw contents, whose elements must be converted.
    """

    model: str
    version: str
    inputs: Sequence[InputTensor]
    outputs: Sequence[OutputTensor] = ()
    size: int = 0
    terms: Terms = _USUAL


def extensions(models: Models, regions: Regions) -> list[str]:
    """Return the protocol extensions that the gateway supports."""
    optional = {"model_repository": models.may_change, "system_shared_memory": regions.allowed}
    usual = ["model_configuration", "schedule_policy", "statistics"]
    return usual + [name for name, is_on in optional.items() if is_on]


Answers = list[tuple[OutputTensor, str, tuple[int, ...], Array]]
"""For each requested output: the `OutputTensor`, datatype, shape and elements, even of an output in shared memory."""


def _size(tensor: InputTensor) -> int:
    return max(tensor.data.byte_size, 0) if isinstance(tensor.data, RegionPlace) else len(tensor.data)


async def infer(
    models: Models, regions: Regions, inference: Inference, timeout: float | None = None
) -> tuple[str, Answers]:
    """Run a request. Repeat the run once if the service died.

    Args:
        timeout: Longest duration of the run in seconds; a request can set a shorter one.

    Returns:
        The model's version, and the requested outputs.

    Raises:
        NNBurstError: The request is invalid, or failed.
    """
    own, priority = inference.terms
    if own is not None:
        timeout = own if timeout is None else min(own, timeout)
    deadline = Deadline.after(timeout)
    model = await models.open(inference.model, inference.version, priority)
    with model.counts.request():
        try:
            return model.version, await _run(model, regions, inference, timeout)
        except DeadObject:
            models.renew_soon()
            if not model.is_repeatable:
                raise
        return model.version, await _run(model, regions, inference, deadline.left())


async def _run(model: OpenedModel, regions: Regions, inference: Inference, timeout: float | None) -> Answers:
    began = time.monotonic_ns()
    texts = sum(_size(tensor) for tensor in inference.inputs if tensor.datatype == "BYTES")
    arrays, used = await convert_in_thread(inference.size + texts, _arrays, model, regions, inference.inputs)
    outputs = model.outputs
    names = [output.name for output in inference.outputs]
    for name in names:  # a repeated output could make the answer huge
        if name not in outputs:
            raise InvalidArgument(f"output {name!r} is unknown; the model gives {list(outputs)}")
        if names.count(name) > 1:
            raise InvalidArgument(f"output {name!r} is asked for twice")
    read = time.monotonic_ns()
    values = dict(zip(outputs, await model.run(arrays, timeout), strict=True))
    ran = time.monotonic_ns()
    for region in used:
        region.check()
    answers = []
    for output in inference.outputs or map(OutputTensor, outputs):
        array = values[output.name]
        shape = array.shape
        if output.place is not None:
            array = await convert_in_thread(text_size(array), to_wire, array)
            _write(regions, output.place, array)
        answers.append((output, outputs[output.name].datatype, shape, array))
    model.counts.add_times(began, read, ran, time.monotonic_ns())
    return answers


def _arrays(
    model: OpenedModel, regions: Regions, inputs: Sequence[InputTensor]
) -> tuple[dict[str, Array], list[RegisteredRegion]]:
    arrays: dict[str, Array] = {}
    used: list[RegisteredRegion] = []
    for each in inputs:
        tensor = model.inputs.get(each.name) or model.optional.get(each.name)
        if tensor is None or each.name in arrays:
            known = "is given twice" if tensor else f"is unknown; the model takes {list(model.inputs)}"
            raise InvalidArgument(f"input {each.name!r} {known}")
        data = each.data
        if isinstance(data, RegionPlace):
            tensor.check_size(each.datatype, each.shape, data.byte_size)
            lying, region = regions.part(data.region, data.offset, data.byte_size)
            used.append(region)
            if tensor.datatype != "BYTES":
                arrays[each.name] = lying.view(tensor.dtype).reshape(each.shape)
                continue
            data = lying.tobytes()  # the client can change the region
            region.check()
        arrays[each.name] = tensor.array_of(each.datatype, each.shape, data)
    return arrays, used


def _write(regions: Regions, place: RegionPlace, array: Array) -> None:
    if array.nbytes > place.byte_size:
        raise InvalidArgument(
            f"an output of {array.nbytes} bytes does not fit into {place.byte_size} of region {place.region!r}"
        )
    part, region = regions.part(place.region, place.offset, place.byte_size)
    part[: array.nbytes] = bytes_of(array)
    region.check()
