"""One request, whichever protocol it came in by: checked, run, and answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from ..errors import InvalidArgument
from ._models import Models, OpenedModel
from ._regions import RegionPart, Regions
from ._tensors import Array, bytes_of

_Result = TypeVar("_Result")
BRISK = 1 << 20
"""Bytes of JSON, or of single elements, that the loop's own thread turns into arrays."""
VERSION = "1"
"""Of every model: a service has one of each name."""


class RegionPlace(NamedTuple):
    """Where a tensor lies in a registered region."""

    region: str
    byte_size: int
    offset: int = 0

    @classmethod
    def of(cls, parameters: Mapping[str, Any], kind: str, name: str) -> RegionPlace | None:
        """Return what the parameters of a tensor say, None if it is not in shared memory.

        Raises:
            InvalidArgument: They make no sense.
        """
        region = parameters.get("shared_memory_region")
        if region is None:
            return None
        size, offset = parameters.get("shared_memory_byte_size"), parameters.get("shared_memory_offset", 0)
        if not isinstance(region, str) or type(size) is not int or type(offset) is not int:
            raise InvalidArgument(f"{kind} {name!r}: a region needs a name and a size in bytes, got {dict(parameters)}")
        return cls(region, size, offset)


class InputTensor(NamedTuple):
    """An input: its elements, or where they lie."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes | memoryview | Sequence[Any] | Array | RegionPlace


class OutputTensor(NamedTuple):
    """An output that is asked for."""

    name: str
    place: RegionPlace | None = None


class Inference(NamedTuple):
    """A request to run a model.

    Attributes:
        model, version: Which.
        inputs, outputs: No outputs: all.
        size: In bytes, of what has to be turned into arrays element by element.
    """

    model: str
    version: str
    inputs: Sequence[InputTensor]
    outputs: Sequence[OutputTensor] = ()
    size: int = 0


async def elsewhere(work: Callable[[], _Result]) -> _Result:
    """Do what takes long, or waits for the service, in another thread."""
    return await asyncio.get_running_loop().run_in_executor(None, work)


Answers = list[tuple[OutputTensor, str, Array]]
"""For each output what was asked, its datatype, and its elements; those with a place have been written there."""


async def infer(models: Models, regions: Regions, inference: Inference, timeout: float | None = None) -> Answers:
    """Run a request.

    Args:
        models: Those that there are.
        regions: Likewise.
        inference: The request.
        timeout: Seconds that the run may take.

    Returns:
        The outputs that are asked for; all, if none is.

    Raises:
        NNBurstError: It cannot be run, or failed.
    """
    model = models.ready(inference.model) or await models.take(inference.model)
    try:
        if inference.version not in ("", VERSION):
            raise InvalidArgument(f"model {inference.model!r} has the version {VERSION}, not {inference.version!r}")
        if inference.size > BRISK:
            arrays, parts = await elsewhere(lambda: _arrays(model, regions, inference.inputs))
        else:
            arrays, parts = _arrays(model, regions, inference.inputs)
        outputs = model.outputs
        if inference.outputs:
            _check_names(inference.outputs, outputs)
        values = dict(zip(outputs, await model.run(arrays, timeout), strict=True))
        for part in parts:
            part.check()
        answers = []
        for output in inference.outputs or map(OutputTensor, outputs):
            array = values[output.name]
            if output.place is not None:
                _put(regions, output.place, array)
            answers.append((output, outputs[output.name].datatype, array))
        return answers
    finally:
        models.give_back(model)


def _check_names(wanted: Sequence[OutputTensor], outputs: Mapping[str, object]) -> None:
    """Check that each is an output of the model, and comes once: a short request must not ask for a huge answer."""
    seen: set[str] = set()
    for output in wanted:
        if output.name not in outputs:
            raise InvalidArgument(f"output {output.name!r} is unknown; the model gives {list(outputs)}")
        if output.name in seen:
            raise InvalidArgument(f"output {output.name!r} is asked for twice")
        seen.add(output.name)


def _arrays(
    model: OpenedModel, regions: Regions, inputs: Sequence[InputTensor]
) -> tuple[dict[str, Array], list[RegionPart]]:
    """Return the inputs by name, and the parts of regions that they lie in."""
    arrays: dict[str, Array] = {}
    parts: list[RegionPart] = []
    for given in inputs:
        tensor = model.inputs.get(given.name)
        if tensor is None or given.name in arrays:
            known = "is given twice" if tensor else f"is unknown; the model takes {list(model.inputs)}"
            raise InvalidArgument(f"input {given.name!r} {known}")
        data = given.data
        if isinstance(data, RegionPlace):
            tensor.check_size(given.datatype, given.shape, data.byte_size)
            part = regions.part(data.region, data.offset, data.byte_size)
            parts.append(part)
            arrays[given.name] = part.bytes.view(tensor.dtype).reshape(given.shape)
        else:
            arrays[given.name] = tensor.array_of(given.datatype, given.shape, data)
    return arrays, parts


def _put(regions: Regions, place: RegionPlace, array: Array) -> None:
    if array.nbytes > place.byte_size:
        raise InvalidArgument(
            f"an output of {array.nbytes} bytes does not fit into {place.byte_size} of region {place.region!r}"
        )
    part = regions.part(place.region, place.offset, place.byte_size)
    part.bytes[: array.nbytes] = bytes_of(array)
    part.check()
