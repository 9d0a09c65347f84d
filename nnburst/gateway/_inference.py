"""One request, whichever protocol it came in by: checked, run, and answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import InvalidArgument
from ._models import Models
from ._regions import Regions
from ._tensors import Array, array_of, bytes_of, check_size, datatype_of, size_of

VERSION = "1"
"""Of every model: a service has one of each name."""


@dataclass(frozen=True)
class RegionPlace:
    """Where a tensor lies in a registered region."""

    region: str
    byte_size: int
    offset: int = 0

    @classmethod
    def of(cls, parameters: Mapping[str, Any], what: str) -> RegionPlace | None:
        """Return what the parameters of a tensor say, None if it is not in shared memory.

        Raises:
            InvalidArgument: They make no sense.
        """
        region = parameters.get("shared_memory_region")
        if region is None:
            return None
        size, offset = parameters.get("shared_memory_byte_size"), parameters.get("shared_memory_offset", 0)
        if not isinstance(region, str) or type(size) is not int or type(offset) is not int:
            raise InvalidArgument(f"{what}: a region needs a name and a size in bytes, got {dict(parameters)}")
        return cls(region, size, offset)


@dataclass(frozen=True)
class Given:
    """An input: its elements, or where they lie."""

    name: str
    datatype: str
    shape: Sequence[int]
    data: bytes | memoryview | Sequence[Any] | RegionPlace


@dataclass(frozen=True)
class Wanted:
    """An output that is asked for."""

    name: str
    place: RegionPlace | None = None


@dataclass(frozen=True)
class Inference:
    """A request to run a model."""

    model: str
    version: str
    inputs: Sequence[Given]
    outputs: Sequence[Wanted] = field(default=())


async def infer(models: Models, regions: Regions, inference: Inference) -> list[tuple[Wanted, str, Array]]:
    """Run a request.

    Returns:
        For each output that is asked for (all, if none is), what was asked, its datatype, and its elements; those with
        a place have been written there.

    Raises:
        NNBurstError: It cannot be run, or failed.
    """
    if inference.version not in ("", VERSION):
        raise InvalidArgument(f"model {inference.model!r} has the version {VERSION}, not {inference.version!r}")
    session = await models.opened(inference.model)
    nodes = {node.name: node for node in session.get_inputs()}
    results = {node.name: (i, node) for i, node in enumerate(session.get_outputs())}
    arrays: dict[str, Array] = {}
    for given in inference.inputs:
        if given.name not in nodes or given.name in arrays:
            known = "is given twice" if given.name in arrays else f"is unknown; the model takes {list(nodes)}"
            raise InvalidArgument(f"input {given.name!r} {known}")
        data, node = given.data, nodes[given.name]
        if isinstance(data, RegionPlace):  # compared before anything is read
            check_size(node, given.shape, size_of(node, given.datatype, given.shape), data.byte_size)
            data = regions.read(data.region, data.offset, data.byte_size)
        arrays[given.name] = array_of(node, given.datatype, given.shape, data)
    wanted = inference.outputs or [Wanted(name) for name in results]
    for output in wanted:
        if output.name not in results:
            raise InvalidArgument(f"output {output.name!r} is unknown; the model gives {list(results)}")
    values = await models.run(inference.model, arrays)
    answers = []
    for output in wanted:
        index, node = results[output.name]
        array = np.ascontiguousarray(values[index])
        if output.place is not None:
            place = output.place
            regions.write(place.region, place.offset, place.byte_size, bytes_of(array))
        answers.append((output, datatype_of(node), array))
    return answers
