"""Strings, sequences, maps and optionals as bytes: what is written is read again, and nothing else ends a reader."""

from __future__ import annotations

import itertools
import random
import tracemalloc
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import nnburst
from nnburst import InvalidArgument
from nnburst.devices.encoded import (
    EncodedMap,
    EncodedSequence,
    EncodedTensor,
    copy_region,
    from_python,
    numpy_type,
    read,
    string_type,
    to_python,
    write,
)

VALUES: tuple[tuple[str, Any], ...] = (
    ("tensor(string)", np.array([["a\0b", "é"], ["", "xy\0"]], object)),
    ("tensor(string)", np.zeros((0, 2), object)),
    ("tensor(string)", np.array("one")),
    ("seq(tensor(float))", [np.float32([1, 2]), np.zeros((0, 3), np.float32), np.float32(7)]),
    ("seq(tensor(string))", [np.array(["a", "bc"]), np.array([], str)]),
    ("seq(tensor(int64))", []),
    ("map(int64,tensor(float))", {3: 0.5, -1: 2.0}),
    ("map(string,tensor(string))", {"k": "v", "": "é"}),
    ("map(string,tensor(double))", {}),
    ("seq(map(string,tensor(float)))", [{"a": 0.5, "b": 0.25}, {}]),
    ("optional(seq(tensor(float16)))", [np.float16([1])]),
    ("optional(tensor(float))", None),
    ("tensor(int4)", np.int8([[-8, 7, -1]])),
    ("tensor(uint4)", np.uint8([15, 0])),
    ("tensor(float4e2m1)", np.zeros((3, 0), np.uint8)),
)


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, np.ndarray):
        return a.shape == np.shape(b) and a.tolist() == np.asarray(b, object).tolist()
    return bool(a == b)


@pytest.mark.parametrize(("holds", "value"), VALUES)
def test_a_value_is_read_as_it_was_written(holds: str, value: Any) -> None:
    data = write(from_python(value, holds, "x"))
    behind = np.full(9, 255, np.uint8)  # of a pool with more room
    got = to_python(read(copy_region(np.concatenate([data, behind]), "x"), "x"))
    assert alike(got, value)
    if isinstance(got, np.ndarray):
        assert (got.dtype, got.flags.writeable) == (numpy_type(holds), True)


def rows_of_maps(values: Any = ((1, 2, 3), (4, 5, 6))) -> EncodedMap:
    keys = from_python(["b", "a", "b"], "tensor(string)", "")
    rows = from_python(np.array(values, np.float32), "tensor(float)", "")
    assert isinstance(keys, EncodedTensor)
    assert isinstance(rows, EncodedTensor)
    return EncodedMap(keys, rows)


def test_rows_of_a_map_are_a_dict_each_in_the_order_of_their_keys() -> None:
    maps = to_python(read(write(rows_of_maps()), "x"))
    assert repr(maps) == repr([{"a": 2.0, "b": 3.0}, {"a": 5.0, "b": 6.0}])
    for shape in ((2, 1), (2, 2, 3), (0, 2), ()):
        with pytest.raises(InvalidArgument, match="a map of keys of shape"):
            read(write(rows_of_maps(np.ones(shape))), "x")


def test_elements_of_less_than_a_byte_are_taken_from_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for name, dtype, numbers in (
        ("int4", ml_dtypes.int4, [-8, 7, 3]),
        ("uint4", ml_dtypes.uint4, [15, 0, 3]),
        ("float4e2m1", ml_dtypes.float4_e2m1fn, [1.5, -6, 0.5]),
        ("float8e5m2", ml_dtypes.float8_e5m2, [1.5, -6, 0.5]),
        ("bfloat16", ml_dtypes.bfloat16, [1.5, -6, 0.5]),
    ):
        array = np.array(numbers, dtype)
        got = to_python(read(write(from_python(array, f"optional(tensor({name}))", "x")), "x"))
        back = got.astype(dtype) if "int" in name else got.view(dtype)
        assert back.tolist() == array.tolist(), name


def test_elements_that_numpy_lacks_are_taken_for_no_others_of_their_size() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    names = {
        "bfloat16": ml_dtypes.bfloat16,
        "float8e4m3fn": ml_dtypes.float8_e4m3fn,
        "float8e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
        "float8e5m2": ml_dtypes.float8_e5m2,
        "float8e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
        "int4": ml_dtypes.int4,
        "uint4": ml_dtypes.uint4,
        "float4e2m1": ml_dtypes.float4_e2m1fn,
    }
    for name in [*names, "uint16", "uint8", "float16", "int8"]:
        for other, dtype in names.items():
            if name == other:
                assert from_python([np.ones(2, dtype)], f"seq(tensor({name}))", "x")
                continue
            with pytest.raises(InvalidArgument, match=rf"x\[0\] is .*, got {np.dtype(dtype)}"):
                from_python([np.ones(2, dtype)], f"seq(tensor({name}))", "x")


def test_numpys_own_strings_are_used_where_it_has_some() -> None:
    assert string_type() == (np.dtypes.StringDType() if hasattr(np.dtypes, "StringDType") else object)


@pytest.mark.parametrize(
    ("holds", "value", "said"),
    [
        ("tensor(string)", np.zeros(2), "an array of str, not of float64"),
        ("tensor(string)", np.array(["a", 1], object), "1' in it, int"),
        ("tensor(string)", [b"a"], "not of"),
        ("tensor(string)", ["\ud800"], "cannot be UTF-8"),
        ("tensor(string)", None, "None"),
        ("tensor(int4)", np.int8([8]), "from -8 to 7"),
        ("seq(tensor(bfloat16))", [np.float32([1])], r"is bfloat16, got float32; convert it with .*ml_dtypes.bfloat16"),
        ("seq(tensor(float))", np.float32([1]), "give a list, not ndarray"),
        ("seq(tensor(float))", [np.float32([1]), np.float64([1])], r"x\[1\] is float32, got float64"),
        ("seq(tensor(float))", [np.float32([1]), None], r"x\[1\] has no array"),
        ("map(int64,tensor(float))", [(1, 2)], "give a dict, not list"),
        ("map(string,tensor(float))", {1: 2.0}, "its keys holds strings"),
        ("map(int64,tensor(float))", {"a": 2.0}, "its keys cannot be made an array"),
        ("optional(tensor(float))", [[1.0], [1.0, 2.0]], "cannot be made an array"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(holds: str, value: Any, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        from_python(value, holds, "x")


def test_bytes_that_another_process_made_up_are_refused_or_read() -> None:
    rng = random.Random(5)
    seeds = [write(from_python(value, holds, "x")) for holds, value in VALUES] + [write(rows_of_maps())]
    refused = 0
    for data in seeds:
        cases = [(at, at + 1) for at in range(data.size) for _ in range(12)] + [(0, data.size)] * 200
        for first, end in cases:
            bad = data.copy()
            for _ in range(rng.randrange(1, 9) if end - first > 1 else 1):
                bad[rng.randrange(first, end)] = rng.randrange(256)
            size = rng.choice((bad.size, bad.size, rng.randrange(bad.size + 1)))
            try:
                to_python(read(copy_region(bad[:size], "x"), "x"))
            except InvalidArgument:
                refused += 1
    assert refused > 1000


@pytest.mark.parametrize(
    "offsets",
    [
        [0, (1 << 63) - 1, -(1 << 63), 7, 8],
        [0, 2, 4, 6, 7],
        [1, 2, 4, 6, 8],
        [0, 2, 2, 6, 8],
        [0, 2, 4, 8],
        [0, 1, 4, 6, 8],
    ],
)
def test_offsets_that_lead_elsewhere_are_refused(offsets: list[int]) -> None:
    tensor = from_python(["a", "b", "c", "d"], "tensor(string)", "x")
    assert isinstance(tensor, EncodedTensor)
    assert tensor.offsets is not None
    assert tensor.offsets.tolist() == [0, 2, 4, 6, 8]
    with pytest.raises(InvalidArgument, match="lead elsewhere"):
        read(write(replace(tensor, offsets=np.int64(offsets))), "x")


@pytest.mark.parametrize("element", [1, 8], ids=["numbers", "strings"])
def test_shape_that_no_array_has_is_refused_though_it_is_empty(element: int) -> None:
    tensor = EncodedTensor(element, (0, 2**32 - 1, 2**32 - 1), np.zeros(0, np.uint8))
    with pytest.raises(InvalidArgument, match=r"x is no encoded value: dimensions .* are larger than a tensor can be"):
        read(write(tensor), "x")


def test_tensors_are_counted_as_they_are_made() -> None:
    many = EncodedSequence(1, (EncodedTensor(1, (0,), np.zeros(0, np.uint8)),) * 1000)
    made = itertools.count()

    def most() -> None:
        if next(made) == 10:
            raise nnburst.ResourceExhausted("that is enough")

    with pytest.raises(nnburst.ResourceExhausted, match="enough"):
        read(write(many), "x", most)
    assert next(made) == 11


@pytest.mark.parametrize(
    "ends", [b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x93\x03\x01\xdd\x10\x00\x00\x00", b"\x91" * 5000]
)
def test_sizes_beyond_the_bytes_are_refused(ends: bytes) -> None:
    with pytest.raises(InvalidArgument, match="no encoded value"):
        read(np.frombuffer(bytes(8) + ends, np.uint8), "x")


@pytest.mark.parametrize("data", [b"\xdd\x00\x01\x00\x00" + b"\x80" * (1 << 16), b"\x91" * 5000 + b"\xc0"])
def test_what_is_no_bytes_where_a_tensor_has_them_is_refused_before_anything_is_made_of_it(data: bytes) -> None:
    body = np.frombuffer(bytes(8) + b"\x94\x01\x01\x91\x01" + data + b"\xc0", np.uint8)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidArgument, match="no encoded value: Expected `bytes`, got `array`"):
            read(body, "x")
        assert tracemalloc.get_traced_memory()[1] < 2 * body.size + (1 << 16)
    finally:
        tracemalloc.stop()


def test_text_that_is_no_utf8_is_refused() -> None:
    tensor = from_python(["é"], "tensor(string)", "x")
    assert isinstance(tensor, EncodedTensor)
    with pytest.raises(InvalidArgument, match="no UTF-8"):
        read(write(replace(tensor, data=np.uint8([0xC3, 0xFF, 0]))), "x")


def test_a_region_without_a_value_says_so() -> None:
    for nbytes in (0, 7, 8, 100):
        with pytest.raises(InvalidArgument, match="no value yet"):
            copy_region(np.zeros(nbytes, np.uint8), "x")
