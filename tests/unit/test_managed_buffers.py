"""Storage that driver-managed buffers share: a copy moves no bytes, and a write is seen in one buffer alone."""

from __future__ import annotations

import numpy as np

from nnburst.memory import ManagedBuffer, Memory, RoleKey
from nnburst.model import OperandDesc, OperandType


def buffers(count: int, dimensions: tuple[int, ...] = (4,)) -> list[ManagedBuffer]:
    operand = OperandDesc(OperandType.TENSOR_FLOAT32, dimensions)
    return [ManagedBuffer(operand, dimensions, frozenset({RoleKey(1, True, 0)})) for _ in range(count)]


def fill(buffer: ManagedBuffer, value: float, size: int = 4) -> None:
    with Memory.ashmem(4 * size) as memory:
        memory.write(np.full(size, value, np.float32))
        buffer.copy_from(memory, (size,))


def contents(buffer: ManagedBuffer, size: int = 4) -> set[float]:
    with Memory.ashmem(4 * size) as memory:
        buffer.copy_to(memory)
        return set(memory.read(np.float32, (size,)).tolist())


def test_storage_that_a_third_buffer_still_has_is_not_given_to_the_source() -> None:
    first, copy, third, other = buffers(4)
    fill(first, 1)
    for each in (copy, third):
        each.copy_buffer(first)
    fill(other, 2)
    copy.copy_buffer(other)  # what it had is the storage of two others
    fill(other, 3)
    assert [contents(each) for each in (first, copy, third, other)] == [{1}, {2}, {1}, {3}]


def test_larger_storage_is_not_kept_for_the_source() -> None:
    """A buffer of open dimensions would hold bytes that nothing accounts for."""
    source, target = buffers(2, (0,))
    fill(target, 1, 8)
    fill(source, 2, 4)
    counted: list[int] = []
    source.account_to(counted.append)
    target.copy_buffer(source)
    fill(source, 3, 4)
    assert source.storage.nbytes == sum(counted) == 16
    assert [contents(source), contents(target)] == [{3}, {2}]


def test_second_copy_does_not_take_the_place_of_the_spare_of_the_first() -> None:
    source, one, other = buffers(3)
    for value, each in enumerate((source, one, other)):
        fill(each, value)
    spare = one.place
    one.copy_buffer(source)
    other.copy_buffer(source)
    fill(source, 5)
    assert source.place == spare
    assert [contents(each) for each in (source, one, other)] == [{5}, {0}, {0}]
