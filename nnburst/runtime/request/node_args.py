"""Descriptions and shapes of a model's arguments, and the conversion of values."""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Collection, Container, Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ...burst.polling import CHANNEL_LENGTH
from ...devices import encoded
from ...errors import GeneralFailure, InvalidArgument
from ...model.dimensions import HIGHEST_RANK
from ...model.extensions import Extension, ImportedModel, OpenShape, extension_operand_type
from ...model.operand_types import is_extension, operand_info
from ...model.types import Array, Model

_MOST_DATUMS = 1 << 16
"""Maximum length of a burst's channel, in datums."""


_TAKES = {"f": "fiu", "i": "iu", "u": "iu"}
"""By ``dtype.kind`` of an input: the kinds of the Python numbers that the input accepts."""
_DLPACK_CPU = 1
_LEAST_ROOM = 8
"""Binary logarithm of the minimum bytes of an encoded input."""


class Encoded(np.ndarray[Any, np.dtype[np.uint8]]):
    """A string, sequence or map, encoded as bytes."""


class NodeArg(Struct, frozen=True, repr_omit_defaults=True):
    """The description of an input or output.

    Attributes:
        name: Name in the model, or ``input0``, ``output0`` …
        shape: Sizes of the dimensions; a symbolic name or None for an open dimension. If the rank is open, None instead
            of a tuple.
        dtype: NumPy type of the elements. If NumPy lacks the type, an integer type of the same size.
        bits_of: Name in ``ml_dtypes`` of a type that NumPy lacks. Arrays of that type are accepted, too.
        type: `OperandType` value.
        scale, zero_point: Quantisation: real value = (stored - zero_point) * scale.
        may_be_empty: True if the array can have no elements.
        holds: ONNX Runtime's name of a type that is not an array of numbers: ``tensor(string)``,
            ``seq(map(int64,tensor(float)))``. Empty for an array of numbers. For such a type, `Session` gives the
            shape and dtype of the value; `Compilation` gives those of an array of bytes that encodes the value.
        value_shape: The shape of the value, if `shape` is the shape of the bytes that encode the value.
        is_optional: True for an input with a default, which callers can omit.

    Example:
        >>> with nnburst.Session(model) as session:
        ...     [(node.name, node.shape, node.dtype.name) for node in session.get_inputs()]
        [('x', (1, 4), 'float32')]
    """

    name: str
    shape: OpenShape
    dtype: np.dtype[Any]
    type: int
    scale: float = 0.0
    zero_point: int = 0
    may_be_empty: bool = False
    holds: str = ""
    value_shape: OpenShape = None
    bits_of: str = ""
    is_optional: bool = False

    @property
    def user_view(self) -> NodeArg:
        """The description for callers. It hides that the values are encoded as bytes."""
        if not self.holds:
            return self
        return replace(self, shape=self.value_shape, dtype=encoded.numpy_type(self.holds), value_shape=None)

    def encode(self, value: object) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the bytes of a value that is not an array of numbers. Raises the same errors as `check`.

        Args:
            value: A value for Python, such as a list of strings.
        """
        place = f"input {self.name!r}"
        shape = self.value_shape
        made = encoded.from_python(value, self.holds, place)
        if isinstance(made, encoded.EncodedTensor) and not self.user_view.admits(made.shape):
            raise InvalidArgument(f"{place} has shape {shape}, got {made.shape}{_remedy(shape, made.shape)}")
        return encoded.write(made)

    def decode(self, region: np.ndarray[Any, np.dtype[np.uint8]]) -> Any:
        """Return the value of encoded bytes.

        Args:
            region: The bytes, which a peer can still change.

        Raises:
            GeneralFailure: The bytes are malformed.
        """
        place = repr(self.name)
        try:
            return encoded.to_python(encoded.read(encoded.copy_region(region, place), place))
        except InvalidArgument as error:
            raise GeneralFailure(f"the service did not give a value: {error}") from None

    @property
    def is_open(self) -> bool:
        """True if the model's shape has open dimensions, an open rank or no elements."""
        if self.shape is None:
            return True
        for size in self.shape:  # a loop is faster than a generator
            if type(size) is not int or not size:
                return True
        return False

    def admits(self, shape: Sequence[int]) -> bool:
        """Return True if arrays fit.

        Args:
            shape: Shape of the arrays.
        """
        if self.shape is None:
            return True
        if len(shape) != len(self.shape):
            return False
        for want, have in zip(self.shape, shape, strict=True):  # a loop is faster than a generator
            if want != have and type(want) is int:
                return False
        return True

    def is_empty(self, shape: Sequence[int]) -> bool:
        """Return True if an array has no elements.

        Args:
            shape: Shape of the array.

        Raises:
            InvalidArgument: The model does not accept empty arrays.
        """
        if 0 not in shape:
            return False
        if not self.may_be_empty:
            raise InvalidArgument(
                f"{self.name!r} has no elements (shape {tuple(shape)}), which this model cannot take; leave the run out"
            )
        return True

    def check(self, value: Any) -> np.ndarray[Any, np.dtype[Any]]:
        """Return a fitting array.

        Args:
            value: Array, or another value that NumPy can convert.

        Raises:
            InvalidArgument: The value does not fit. The message has a remedy.
        """
        if type(value) is Encoded:
            return value
        if type(value) is np.ndarray and value.dtype == self.dtype and not self.holds:
            if self.admits(value.shape) and 0 not in value.shape:
                return value  # this is the usual case
        if self.holds:
            bytes_of = self.encode(value)
            room = np.zeros(1 << max(_LEAST_ROOM, (bytes_of.size - 1).bit_length()), np.uint8)
            room[: bytes_of.size] = bytes_of  # rooms are powers of two, because each size needs an execution
            return room.view(Encoded)
        if value is None:
            raise InvalidArgument(f"input {self.name!r} has no array, but None; give one of {self.dtype}")
        if self.bits_of and str(getattr(value, "dtype", "")) == f"torch.{self.bits_of}":
            value = value.view(getattr(sys.modules["torch"], str(self.dtype)))  # NumPy gets the bits
        array = as_array(value, f"input {self.name!r}")
        boolean = self.dtype == np.uint8 and array.dtype == np.bool_
        if array.dtype.name == self.bits_of:
            array = array.view(self.dtype)
        elif self._is_of_numbers(value, array):
            array = self._converted(array)
        elif array.dtype != self.dtype and not boolean:
            wanted = f"ml_dtypes.{self.bits_of}" if self.bits_of else repr(str(self.dtype))
            got, remedy = str(array.dtype), f"convert it with .astype({wanted})"
            if not isinstance(value, np.ndarray | np.generic):
                got = f"a {type(value).__name__}, which becomes an array of {got}"
                remedy = f"give numpy.array(…, {wanted})"
            bits = f", the bits of {self.bits_of}" * bool(self.bits_of)
            raise InvalidArgument(f"input {self.name!r} is {self.dtype}{bits}, got {got}; {remedy}")
        if array.size == 1 and self.shape is not None and all(size == 1 for size in self.shape):
            array = array.reshape((1,) * len(self.shape))
        if not self.admits(array.shape):
            remedy = _remedy(self.shape, array.shape)
            raise InvalidArgument(f"input {self.name!r} has shape {self.shape}, got {array.shape}{remedy}")
        self.is_empty(array.shape)
        return array

    def _is_of_numbers(self, value: object, array: Array) -> bool:
        """Return True if a value consists of Python numbers that suit the declared type."""
        if isinstance(value, np.ndarray) or not isinstance(value, list | tuple | int | float | np.generic):
            return False
        return not self.bits_of and (not array.size or array.dtype.kind in _TAKES.get(self.dtype.kind, ""))

    def _converted(self, array: Array) -> Array:
        """Return numbers in the declared type. Raises `InvalidArgument` if the type cannot represent a number."""
        with np.errstate(over="ignore"):
            made = array.astype(self.dtype)
        fits = np.isfinite(made) | ~np.isfinite(array) if array.dtype.kind == "f" else made == array
        if not fits.all():
            raise InvalidArgument(f"input {self.name!r} is {self.dtype}, which has no {array[~fits][0]}")
        return made


def as_array(value: Any, what: str) -> Array:
    """Return a value as an array. Tensors in this process's memory, and objects with DLPack, are not copied.

    Raises:
        InvalidArgument: The value is a tensor on a GPU or with gradients, or a list of rows of different lengths.
    """
    try:
        if hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
            return np.from_dlpack(value)
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        remedy = ""
        with contextlib.suppress(Exception):  # a deleted array has no device, and torch's meta device no number
            remedy = "; copy it to the CPU first" * (value.__dlpack_device__()[0] != _DLPACK_CPU)
        raise InvalidArgument(f"{what} cannot be made an array: {error}{remedy}") from None


def _remedy(wanted: OpenShape, shape: tuple[int, ...]) -> str:
    """Return advice to add a batch dimension, if that gives an array the wanted shape."""
    assert wanted is not None
    is_row = len(wanted) == len(shape) + 1 and (wanted[0] == 1 or not isinstance(wanted[0], int))
    fits = all(want == have or not isinstance(want, int) for want, have in zip(wanted[1:], shape, strict=False))
    return "; add a batch dimension: array[None]" if is_row and fits else ""


def _argument(model: Model, index: int, name: str, extensions: Sequence[Extension]) -> NodeArg:
    operand, bits_of = model.main.operands[index], ""
    if is_extension(operand.type):
        described = extension_operand_type(model, operand.type, extensions)
        dtype, is_scalar, bits_of = described.element(), not described.is_tensor, described.bits_of
    else:
        info = operand_info(operand.type)
        if info.dtype is None:
            raise InvalidArgument(f"{name!r} has operand type {operand.type}, which has no NumPy type")
        dtype, is_scalar = info.dtype, info.is_scalar
    shape: OpenShape = tuple(d or None for d in operand.dimensions)
    if not shape and not is_scalar:
        shape = None
    return NodeArg(name, shape, dtype, int(operand.type), operand.scale, operand.zero_point, bits_of=bits_of)


def model_arguments(
    model: Model, extensions: Sequence[Extension] = ()
) -> tuple[tuple[NodeArg, ...], tuple[NodeArg, ...]]:
    """Return (inputs, outputs) of a model's main subgraph."""

    def make_node_args(indexes: Sequence[int], names: Sequence[str], kind: str) -> tuple[NodeArg, ...]:
        chosen = names or [f"{kind}{i}" for i in range(len(indexes))]
        return tuple(_argument(model, i, name, extensions) for i, name in zip(indexes, chosen, strict=True))

    inputs = make_node_args(model.main.input_indexes, model.input_names, "input")
    return inputs, make_node_args(model.main.output_indexes, model.output_names, "output")


def imported_arguments(
    imported: ImportedModel, extensions: Sequence[Extension]
) -> tuple[tuple[NodeArg, ...], tuple[NodeArg, ...]]:
    """Return (inputs, outputs) of a model file, with symbolic dimensions."""

    def with_shapes(
        arguments: Sequence[NodeArg], indexes: Sequence[int], shapes: Sequence[OpenShape]
    ) -> tuple[NodeArg, ...]:
        rows = (replace(each, shape=shape, may_be_empty=True) for each, shape in zip(arguments, shapes, strict=True))
        held = (imported.model.main.operands[i].extra_params for i in indexes)
        return tuple(
            replace(row, shape=(None,), holds=bytes(text).decode(), value_shape=row.shape) if text else row  # type: ignore[arg-type]
            for row, text in zip(rows, held, strict=True)
        )

    main, (inputs, outputs) = imported.model.main, model_arguments(imported.model, extensions)
    required = len(inputs) - imported.optional_inputs
    inputs = (*inputs[:required], *(replace(each, is_optional=True) for each in inputs[required:]))
    return (
        with_shapes(inputs, main.input_indexes, imported.input_shapes),
        with_shapes(outputs, main.output_indexes, imported.output_shapes),
    )


def checked_inputs(nodes: Sequence[NodeArg], inputs: object) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
    """Return the caller's inputs as arrays by name, in the model's order.

    Raises:
        InvalidArgument: An input is missing, unknown or does not fit.
    """
    if not isinstance(inputs, Mapping):
        raise InvalidArgument(f"inputs are a dict of arrays by name, not {type(inputs).__name__}")
    by_name = {node.name: node for node in nodes}
    if inputs.keys() != by_name.keys():
        optional = [node.name for node in nodes if node.is_optional]
        missing = sorted(by_name.keys() - inputs.keys() - set(optional))
        extra = sorted(str(name) for name in inputs.keys() - by_name.keys())
        if missing or extra:
            wrong = [f"no inputs {extra}"] * bool(extra) + [f"inputs {missing} are missing"] * bool(missing)
            takes = [name for name, node in by_name.items() if not node.is_optional]
            also = f" and, if given, {', '.join(map(repr, optional[:8]))}{', …' * (len(optional) > 8)}" * bool(optional)
            raise InvalidArgument(f"{'; '.join(wrong)}; this model takes {takes}{also}")
    return {name: node.check(inputs[name]) for name, node in by_name.items() if name in inputs}


class NoSuchArray(InvalidArgument, KeyError):
    """No shared array has the requested name."""

    __str__ = Exception.__str__  # a KeyError would quote its message


class SharedArrays(dict[str, np.ndarray[Any, np.dtype[Any]]]):
    """A mapping of shared arrays by name. Write into the arrays: they cannot be replaced."""

    __slots__ = ()

    def __setitem__(self, name: str, value: object) -> NoReturn:
        raise InvalidArgument(
            f"the array of {name!r} is shared with the service and cannot be replaced; write into it: [{name!r}][:] = …"
        )

    def __missing__(self, name: str) -> NoReturn:
        raise NoSuchArray(f"no shared array {name!r}; there are {list(self)}")

    def _refuse(self, *args: object, **more: object) -> NoReturn:
        raise InvalidArgument("these arrays are shared with the service; none can be added, replaced or removed")

    __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse


class SharedValues(Mapping[str, Any]):
    """A mapping of shared arrays and other values by name. Other values are encoded when set and decoded when read.

    Args:
        arrays: The shared arrays.
        nodes: The arguments with encoded values, by name.
    """

    def __init__(self, arrays: SharedArrays, nodes: Mapping[str, NodeArg]) -> None:
        self._arrays, self._nodes = arrays, nodes

    def __getitem__(self, name: str) -> Any:
        array, node = self._arrays[name], self._nodes.get(name)
        return array if node is None else node.decode(array)

    def __setitem__(self, name: str, value: object) -> None:
        node = self._nodes.get(name)
        if node is None:
            SharedArrays.__setitem__(self._arrays, name, value)
        assert node is not None
        data, view = node.encode(value), self._arrays[name]
        if data.size > view.size:
            raise InvalidArgument(
                f"{name!r} takes {data.size} bytes, and there are {view.size}; say how many there shall be with "
                f"bind(shapes={{{name!r}: ({2 * data.size},)}})"
            )
        view[: data.size] = data

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def answer_length(outputs: Sequence[NodeArg]) -> int:
    """Return the length of the longest result packet, in elements of the result channel.

    It has 2 elements, 1 for each output, and 1 for each dimension of each output.
    """
    ranks = (HIGHEST_RANK if argument.shape is None else len(argument.shape) for argument in outputs)
    return min(2 + len(outputs) + sum(ranks), _MOST_DATUMS)


def channel_lengths(inputs: Sequence[NodeArg], outputs: Sequence[NodeArg]) -> tuple[int, int]:
    """Return the lengths in datums of a burst's request channel and result channel.

    The result channel has room for the dimensions of all outputs, because answers contain the shapes of outputs.
    """
    arguments = (*inputs, *outputs)
    with_pools = answer_length(arguments) + len(arguments)
    return min(max(CHANNEL_LENGTH, with_pools), _MOST_DATUMS), max(CHANNEL_LENGTH, answer_length(outputs))


class Sizes(Struct, frozen=True):
    """The shapes of all arguments, as far as they are known before a run.

    Attributes:
        inputs: One shape per input; None for an omitted optional input.
        outputs: One shape per output; None if it is known only after a run.
    """

    inputs: tuple[tuple[int, ...] | None, ...]
    outputs: tuple[tuple[int, ...] | None, ...]

    @property
    def form(self) -> Hashable:
        """The properties that `reshape` must keep: ranks, and which arguments are omitted or empty."""
        shapes = (*self.inputs, *self.outputs)
        return tuple([s if s is None else ~len(s) if 0 in s else len(s) for s in shapes])


def solve_shapes(
    inputs: Sequence[NodeArg],
    outputs: Sequence[NodeArg],
    given: Mapping[str, int | Sequence[int]],
    present: Collection[str] = (),
) -> Sizes:
    """Return the shape of every argument.

    If one argument determines the size of a named dimension, dimensions of this name in other arguments get the same
    size. If the caller's complete shapes give a name several sizes, this is no error, but the other arguments get no
    size for this name.

    Args:
        given: Complete shapes by argument name, and sizes by dimension name.
        present: Optional inputs that are present even without a given shape.

    Raises:
        InvalidArgument: A name is unknown, a shape is missing, or the arguments contradict each other or the model.
    """
    every = (*inputs, *outputs)
    shapes, named_sizes = _split_shapes(every, given)
    for argument in every:
        shape = shapes.get(argument.name)
        if shape is None:
            continue
        if not argument.admits(shape) or min(shape, default=1) < 0:
            raise InvalidArgument(f"{argument.name!r} has shape {argument.shape}, which does not admit {shape}")
        argument.is_empty(shape)
        for name, size in zip(argument.shape or (), shape, strict=False):
            if isinstance(name, str) and named_sizes.get(name, size) != size:
                raise InvalidArgument(f"{argument.name!r} of shape {shape} contradicts {name!r} = {named_sizes[name]}")
    sizes = complete_shapes(inputs, outputs, shapes, named_sizes)
    complete: list[tuple[int, ...] | None] = []
    for argument, shape in zip(inputs, sizes.inputs, strict=True):
        if argument.is_optional and argument.name not in shapes and argument.name not in present:
            complete.append(None)
            continue
        if shape is None and argument.holds:
            shape = (encoded.ROOM,)
        if shape is None:
            name = next((n for n in argument.shape or () if isinstance(n, str) and n not in named_sizes), argument.name)
            hint = f"bind(shapes={{{name!r}: …}})"
            raise InvalidArgument(f"input {argument.name!r} has open dimensions {argument.shape}; say them with {hint}")
        argument.is_empty(shape)
        complete.append(shape)
    return Sizes(tuple(complete), sizes.outputs)


def complete_shapes(
    inputs: Sequence[NodeArg],
    outputs: Sequence[NodeArg],
    shapes: Mapping[str, tuple[int, ...]],
    named_sizes: Mapping[str, int] = MappingProxyType({}),
    left_out: Container[str] = (),
) -> Sizes:
    """Return complete shapes, made from given shapes and the model's shapes; None for an incomplete shape.

    Args:
        named_sizes: Sizes by dimension name.
        left_out: Omitted optional inputs.
    """
    every, sizes = (*inputs, *outputs), dict[str | None, int | None](named_sizes)
    for argument in every:
        if argument.shape is not None and (shape := shapes.get(argument.name)) is not None:
            for name, size in zip(argument.shape, shape, strict=True):
                if type(name) is str and sizes.setdefault(name, size) != size:
                    sizes[name] = None
    complete: list[tuple[int, ...] | None] = []
    for argument in every:
        shape = shapes.get(argument.name)
        if shape is None and argument.shape is not None and not argument.holds and argument.name not in left_out:
            found = [size if type(size) is int else sizes.get(size) for size in argument.shape]  # type: ignore[arg-type]
            shape = None if None in found else tuple(found)  # type: ignore[arg-type]
        complete.append(shape)
    return Sizes(tuple(complete[: len(inputs)]), tuple(complete[len(inputs) :]))


def _split_shapes(
    arguments: Sequence[NodeArg], given: Mapping[str, int | Sequence[int]]
) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
    names = {argument.name for argument in arguments}
    dimensions = {
        size for node in arguments for size in (*(node.shape or ()), *(node.value_shape or ())) if isinstance(size, str)
    }
    shapes: dict[str, tuple[int, ...]] = {}
    sizes: dict[str, int] = {}
    for name, value in given.items():
        try:
            if name in names and not isinstance(value, str | int | np.integer):
                shapes[name] = tuple(operator.index(size) for size in value)
            elif name in dimensions:
                sizes[name] = operator.index(value)  # type: ignore[arg-type]
                if sizes[name] < 0:
                    raise InvalidArgument(f"dimension {name!r} cannot be {sizes[name]}")
            elif name in names:
                raise TypeError
            else:
                raise InvalidArgument(
                    f"shapes for unknown name {name!r}; the model has arguments {sorted(names)} and dimensions "
                    f"{sorted(dimensions)}"
                )
        except TypeError:
            raise InvalidArgument(
                f"shapes[{name!r}] is {value!r}; give a tuple of sizes for an argument, one size for a dimension"
            ) from None
    return shapes, sizes
