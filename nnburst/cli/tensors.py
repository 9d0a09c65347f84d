"""Creation of input values, and conversion of outputs to text, JSON and files."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..devices import encoded
from ..errors import InvalidArgument
from ..runtime.request.node_args import NodeArg
from .targets import parse_pairs

Array = np.ndarray[Any, np.dtype[Any]]

_EMPTY: dict[str, Any] = {"seq": [], "map": {}, "optional": None}


def describe(argument: NodeArg) -> str:
    if not _is_array(argument):
        return f"{argument.name}: {argument.holds}"
    shape = "any shape" if argument.shape is None else f"[{', '.join(str(d or '?') for d in argument.shape)}]"
    return f"{argument.name}: {argument.holds or argument.dtype.name} {shape}"


def as_row(argument: NodeArg) -> dict[str, Any]:
    """Return the description of an argument for JSON. The shape is null if any rank is accepted."""
    shape = None if argument.shape is None else list(argument.shape)
    return {"name": argument.name, "dtype": argument.holds or argument.dtype.name, "shape": shape}


def _is_array(argument: NodeArg) -> bool:
    return not argument.holds or encoded.inner_types(argument.holds)[0] == "tensor"


def as_result(argument: NodeArg, value: Any) -> dict[str, Any]:
    """Return the description of an output for JSON. A list's shape is its length; a dict has no shape."""
    shape = [len(value)] if isinstance(value, list) else list(value.shape) if isinstance(value, np.ndarray) else None
    return {"name": argument.name, "dtype": argument.holds or value.dtype.name, "shape": shape}


def plain(value: Any) -> Any:
    """Return an output's value for JSON, with arrays as lists."""
    if isinstance(value, list):
        return list(map(plain, value))
    return value.tolist() if isinstance(value, np.ndarray) else value


def shorten(value: Any) -> str:
    """Return a value as text, shortened if long."""
    return np.array2string(value, threshold=40, precision=6) if isinstance(value, np.ndarray) else reprlib.repr(value)


def as_saved(value: Any) -> Array:
    """Return a value as an array that NumPy can load without pickle.

    Strings become an array of fixed width, or JSON if one of them ends with NUL. A value that is not an array becomes
    JSON.
    """
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in ("O", "T"):
            return value
        texts = value.reshape(-1).tolist()
        if not any(text.endswith("\0") for text in texts):
            return np.array(texts, "U").reshape(value.shape)
    return np.array(json.dumps(plain(value)))


def parse_shapes(pairs: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes in ``NAME=1,3,224,224`` options. Raises the same errors as `parse_pairs`."""
    try:
        return {
            name: tuple(int(size) for size in value.split(",") if size)
            for name, value in parse_pairs(pairs, "--shape").items()
        }
    except ValueError as error:
        raise InvalidArgument(f"--shape: {error}") from None


def load_arrays(files: Mapping[str, str]) -> dict[str, Array]:
    """Return the arrays in ``.npy`` files, by name of the input.

    Raises:
        InvalidArgument: A file cannot be read, or does not contain an array of numbers.
    """
    out: dict[str, Array] = {}
    for name, file in files.items():
        array = load_array(file)
        if isinstance(array, Mapping):
            raise InvalidArgument(f"input {name!r}: {file} holds several arrays; save one with numpy.save")
        out[name] = array
    return out


def load_array(file: str | os.PathLike[str]) -> Array | dict[str, Array]:
    """Return the array in a ``.npy`` file, or the arrays in a ``.npz`` file by name.

    Raises:
        InvalidArgument: The file cannot be read, or contains other values than numbers.
    """
    try:
        with open(file, "rb") as stream:
            found = np.load(stream, allow_pickle=False)
            if isinstance(found, np.ndarray):
                return found
            with found:
                return {name: found[name] for name in found.files}
    except Exception as error:  # a damaged file can cause any error in NumPy
        raise InvalidArgument(f"{file} is no .npy or .npz file that can be read: {error}") from None


def generate_values(arguments: Sequence[NodeArg], shapes: Mapping[str, Sequence[int]], seed: int = 0) -> dict[str, Any]:
    """Return reproducible values for arguments: random floats in [0, 1), zeros for other numbers, "0" for strings.

    Sequences, maps and optionals are empty.

    Args:
        arguments: The arguments. Open dimensions become 1.
        shapes: Shapes of arguments by name, for open dimensions other than 1.
        seed: Seed of the random numbers.

    Raises:
        InvalidArgument: A shape belongs to no argument or does not fit, or an argument of open rank has no shape.
    """
    unknown = sorted(set(shapes) - {argument.name for argument in arguments})
    if unknown:
        names = [argument.name for argument in arguments]
        raise InvalidArgument(f"--shape for {unknown}; the inputs that are made up are {names}")
    rng = np.random.default_rng(seed)
    out: dict[str, Any] = {}
    for argument in arguments:
        if not _is_array(argument):
            out[argument.name] = _EMPTY[encoded.inner_types(argument.holds)[0]]
            continue
        shape = shapes.get(argument.name)
        if shape is None:
            if argument.shape is None:
                raise InvalidArgument(f"the rank of {argument.name!r} is open: give --shape {argument.name}=…")
            shape = [size if isinstance(size, int) else 1 for size in argument.shape]
        if not argument.admits(shape):
            raise InvalidArgument(f"{argument.name!r} has shape {argument.shape}, which does not admit {tuple(shape)}")
        try:
            array = rng.random(tuple(shape)) if argument.dtype.kind == "f" else np.zeros(tuple(shape), np.int8)
            out[argument.name] = array.astype("U1" if argument.dtype.kind in ("O", "T") else argument.dtype)
        except (MemoryError, ValueError) as error:  # too many dimensions for NumPy raise ValueError
            raise InvalidArgument(f"{argument.name!r} of shape {tuple(shape)} cannot be made up: {error}") from None
    return out
