"""A device's access to a request's memory. The memory is mapped with only the necessary rights, or copied."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from ..errors import BadState, GeneralFailure, InvalidArgument
from ..model.types import Array, DataLocation, MemoryLike, Named, Request, RequestArgument
from .descriptor import MemoryMapping, private_bytes
from .memory import PAGES_GONE, Memory

if TYPE_CHECKING:
    import numpy.typing as npt


def undecodable_pools(pools: Iterable[MemoryLike | Named]) -> dict[int, GeneralFailure]:
    """Return {index: error} for the pools that a device can neither map nor copy."""
    failures: dict[int, GeneralFailure] = {}
    for index, pool in enumerate(pools):
        if isinstance(pool, Memory):
            try:
                pool._check_usable()
            except GeneralFailure as error:
                failures[index] = error.with_traceback(None)  # The traceback's frames would keep the pools.
    return failures


def check_pools(pools: Iterable[MemoryLike | Named], of_what: str) -> None:
    """Raise `GeneralFailure` for a pool that a device can neither map nor copy."""
    for index, error in undecodable_pools(pools).items():
        raise GeneralFailure(f"pool {index} of the {of_what}: {error}") from error


def check_open(request: Request) -> None:
    """Raise `BadState` if the memory of an input or output is closed."""
    for kind, arguments in (("input", request.inputs), ("output", request.outputs)):
        for i, argument in enumerate(arguments):
            index = argument.location.pool_index
            # The service refuses an index that is out of range.
            pool = request.pools[index] if not argument.has_no_value and 0 <= index < len(request.pools) else None
            if getattr(pool, "closed", False):
                raise BadState(f"the memory of {kind} {i} is closed: {pool!r}; keep it open until the run has ended")


def read_constant(pool: MemoryLike, dtype: npt.DTypeLike, dims: tuple[int, ...], offset: int) -> Array:
    """Return a private copy of a constant. Raises `InvalidArgument` or `GeneralFailure` if it cannot be read."""
    return pool.read(dtype, dims, offset) if isinstance(pool, Memory) else pool.array(dtype, dims, offset).copy()


class Region:
    """The bytes of one argument as a separate pool for a device's kernel.

    Args:
        is_private: True if no client can change the bytes while a kernel runs.
        room: Number of bytes from the region's start that no other argument of the request uses.
        origin: Index of the region's pool in the request, and the region's offset in that pool.
    """

    kind = "region"

    def __init__(
        self, raw: Array, *, is_private: bool = False, room: int = 0, origin: tuple[int, int] = (0, 0)
    ) -> None:
        self._raw = raw
        self.size = raw.nbytes
        self.is_private = is_private
        self.room = room
        self.origin = origin

    def array(self, dtype: npt.DTypeLike, shape: tuple[int, ...], offset: int = 0) -> Array:
        element = np.dtype(dtype)
        nbytes = math.prod(shape) * element.itemsize
        if offset < 0 or offset + nbytes > self.size:
            raise InvalidArgument(f"{nbytes} bytes at offset {offset} exceed an argument of {self.size} bytes")
        return self._raw[offset : offset + nbytes].view(element).reshape(shape)


class OpenRequest:
    """A request whose memory is open for one device; `open_request` returns it.

    Attributes:
        request: The request with each argument in a `Region`. Arguments in pools other than `Memory` are unchanged.
        is_direct: True if runs need no copies: all memory is mapped and accesses cannot fail.
    """

    def __init__(self, take: Callable[[int], None]) -> None:
        self.request = Request((), ())
        self._take = take
        self._inputs: list[tuple[Memory, int, Array]] = []
        self._outputs: list[tuple[Memory, int, Array]] = []
        self._fallible: dict[int, tuple[Memory, MemoryMapping]] = {}
        self._bracketed: dict[int, tuple[Memory, bool]] = {}

    @property
    def is_direct(self) -> bool:
        return not (self._inputs or self._outputs or self._fallible or self._bracketed)

    def before_run(self) -> None:
        """Copy inputs whose memory is not mapped. Raises `GeneralFailure` if an input cannot be read."""
        for memory, write in self._bracketed.values():
            memory.begin_access(write=write)
        for memory, offset, private in self._inputs:
            memory._copy_out(offset, private)

    def after_run(self, succeeded: bool) -> None:
        """Copy outputs that were computed in private memory to the client's memory, and detect truncated mappings.

        Args:
            succeeded: True if there are outputs to copy.

        Raises:
            GeneralFailure: An output cannot be copied, or a mapped object was truncated.
        """
        for memory, write in self._bracketed.values():
            memory.end_access(write=write)
        # The last page of a truncated object does not fault, so the size is compared, too.
        used = self._fallible.values()
        victims = [(memory, mapping) for memory, mapping in used if mapping.faults or undecodable_pools([memory])]
        for memory, mapping in victims:
            memory._evict(mapping)
        if victims:
            raise GeneralFailure(f"{PAGES_GONE}; the results of the execution are void")
        if succeeded:
            for memory, offset, private in self._outputs:
                memory._copy_in(offset, private)

    def open_argument(
        self, memory: Memory, location: DataLocation, *, write: bool, rights: bool, room: int = 0
    ) -> Region:
        """Open one argument.

        Args:
            write: True if the request writes this argument.
            rights: True if the request writes any argument in the same pool, which is then mapped for writing.
            room: Bytes that the device may write beyond the argument's length.
        """
        offset, length, image = location.offset, location.length, memory.image
        if image is not None:
            length = image.tight_size
        if memory.mappable and (image is None or image.is_tensor):
            mapping = memory._map_for(writable=rights)
            if memory._fallible:
                self._fallible[id(memory)] = memory, mapping
            if memory.dma_buf:
                self._bracketed[id(memory)] = memory, rights
            raw = mapping.bytes()[offset : offset + length]
            if not write:
                raw = raw[:]
                raw.flags.writeable = False
            return Region(raw, room=room, origin=(location.pool_index, offset))
        private = self._allocate(length)  # A short result must not expose older bytes.
        (self._outputs if write else self._inputs).append((memory, offset, private))
        return Region(private, is_private=True)

    def _allocate(self, nbytes: int) -> Array:
        self._take(nbytes)
        return private_bytes(nbytes)


def open_request(request: Request, take: Callable[[int], None] = lambda nbytes: None) -> OpenRequest:
    """Open the memory of a request that `validate_request` accepted.

    Memory that cannot be truncated is mapped. The mapping is read-only if the request writes nothing in the pool.
    Arguments in other memory get private memory: `OpenRequest.before_run` fills inputs, and `OpenRequest.after_run`
    copies outputs back.

    Args:
        take: Function that is called with the size in bytes before private memory is allocated.

    Raises:
        GeneralFailure: A pool can be neither mapped nor copied, even if no argument uses it.
    """
    check_pools(request.pools, "request")
    opened = OpenRequest(take)
    written = {argument.location.pool_index for argument in request.outputs if not argument.has_no_value}
    for index in written:
        pool = request.pools[index]
        if isinstance(pool, Memory):
            pool._check_writable()
    pools: list[Any] = list(request.pools)
    starts: dict[tuple[int, int], list[int]] = {}  # Two pools may be parts of one file.
    for argument in (*request.inputs, *request.outputs):
        where = argument.location
        if not argument.has_no_value and isinstance(memory := request.pools[where.pool_index], Memory):
            device, inode, base, _ = memory.identity
            starts.setdefault((device, inode), []).append(base + where.offset)

    def room(memory: Memory, location: DataLocation) -> int:
        device, inode, base, _ = memory.identity
        first, end = base + location.offset, base + memory.size
        return min([end, *(start for start in starts[device, inode] if start > first)]) - first

    def redirect(arguments: tuple[RequestArgument, ...], *, write: bool) -> tuple[RequestArgument, ...]:
        out = []
        for argument in arguments:
            location = argument.location
            pool = None if argument.has_no_value else request.pools[location.pool_index]
            if isinstance(pool, Memory):
                rights = location.pool_index in written
                region = opened.open_argument(pool, location, write=write, rights=rights, room=room(pool, location))
                argument = replace(argument, location=DataLocation(len(pools), 0, region.size))
                pools.append(region)
            out.append(argument)
        return tuple(out)

    inputs, outputs = redirect(request.inputs, write=False), redirect(request.outputs, write=True)
    opened.request = Request(inputs, outputs, tuple(pools))
    return opened
