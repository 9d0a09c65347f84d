"""A device that runs Python functions. Functions come from the program that starts the service, never from a client.

```python
# filters.py
import nnburst
from nnburst import Tensor

@nnburst.declare(inputs=[Tensor("image", "float32", ("h", "w"))], outputs=[Tensor("edges", "float32", ("h", "w"))])
def edges(image):
    return abs(image - image.mean())
```

``nnburst serve filters.py:edges`` or ``launch(devices=["nnburst-function:call=filters.py:edges"])`` offers the
function, and ``service.session("edges")`` opens it. `nnburst.Session` and ``launch(functions=[edges])`` pickle a
function and send it to a service that they start: see `SentFunction`.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import math
import os
import pickle
import sys
import traceback
from collections import ChainMap
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, ClassVar, NoReturn, TypeVar

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import force_setattr

from .._core.fds import FdSet
from ..burst.kernel import Kernel
from ..errors import (
    DeviceUnavailable,
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    NNBurstError,
    OutputInsufficientSize,
    OutputShape,
    error_for,
)
from ..memory.managed import BufferTracker
from ..memory.memory import Memory
from ..model.dimensions import combine_dimensions, is_fully_specified
from ..model.extensions import Extension, ImportedModel, OpenShape, extension_prefix
from ..model.operand_types import OperandType, operand_info
from ..model.running import ExecutionResult, RunOptions, failure_of
from ..model.types import NO_TIMING, Array, Model, OperandDesc, Operation, Request, RequestArgument
from .common import call_by_name, extension_of_names, find_named
from .elements import element_of, element_types, operand_code
from .interfaces import Needs
from .local import LocalDevice, LocalModel
from .plan import pool_of

_log = logging.getLogger(__name__)

EXTENSION_NAME = "org.nnburst.function"
_PREFIX = 1
_FILES = (".onnx", ".tflite")
"""Endings by which a session recognises the names of model files."""
_MOST_BYTES = 2**32 - 1
"""Largest size of a pickle in bytes. A message cannot contain more."""
_EXTENSION = extension_of_names(EXTENSION_NAME, *element_types())

Function = TypeVar("Function", bound=Callable[..., Any])


class Tensor(Struct, frozen=True):
    """An argument or result of a function.

    Attributes:
        name: Name for `Session.run`.
        dtype: Type of the elements, as in NumPy (``"float32"``, ``np.float32``) or as an `OperandType`: numbers of 1,
            2, 4 or 8 bytes, or ``"bool"``.
        shape: Dimensions. A name or None is an arbitrary size; None instead of a tuple is an arbitrary rank.

    Example:
        >>> nnburst.Tensor("image", "uint8", ("height", "width", 3)).dimensions
        (0, 0, 3)
    """

    name: str
    dtype: Any
    shape: OpenShape = None

    def __post_init__(self) -> None:
        dtype = operand_info(self.dtype).dtype if isinstance(self.dtype, OperandType) else self.dtype
        if not isinstance(dtype, str | None):
            with contextlib.suppress(TypeError):  # `declare` reports the error.
                force_setattr(self, "dtype", str(np.dtype(dtype)))

    @property
    def dimensions(self) -> tuple[int, ...]:
        """The dimensions of the tensor's operand, with 0 for an arbitrary size."""
        return tuple(size if isinstance(size, int) else 0 for size in self.shape or ())

    @property
    def element(self) -> np.dtype[Any]:
        """The NumPy type of an element."""
        return np.dtype(self.dtype or "none")  # For NumPy, None is float64.


class Declaration(Struct, frozen=True):
    """A function's declared name, inputs, outputs and needs."""

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    needs: Needs = Needs()


def declare(
    *, inputs: Sequence[Tensor], outputs: Sequence[Tensor], name: str | None = None, needs: Needs = Needs()
) -> Callable[[Function], Function]:
    """Declare a function's inputs and outputs, so that a service can run the function.

    The function gets one array per input. These arrays are read-only, and valid only while the function runs. It
    returns one array, or a tuple with one array per output.

    Args:
        inputs: Inputs in the order of the function's parameters.
        outputs: Outputs, at least one.
        name: Name by which clients open the function; None for the function's own name. The name must not end with
            ``.onnx`` or ``.tflite``.
        needs: Rights that the function needs while it runs, besides reading code. The sandbox refuses all others.

    Returns:
        A decorator, which returns the function unchanged.

    Raises:
        InvalidArgument: A type, shape or name is not allowed, two tensors have one name, or there is no output.

    Example:
        >>> from nnburst import Tensor
        >>> @nnburst.declare(inputs=[Tensor("x", "float32", (None,))], outputs=[Tensor("total", "float32", (1,))])
        ... def total(x):
        ...     return x.sum(keepdims=True)
        >>> total(np.ones(3, np.float32))
        array([3.], dtype=float32)
    """
    for what, tensors in (("inputs", inputs), ("outputs", outputs)):
        if not isinstance(tensors, tuple | list) or not all(isinstance(tensor, Tensor) for tensor in tensors):
            raise InvalidArgument(f"{what} is {tensors!r}; give a list of nnburst.Tensor(name, dtype, shape)")
    if name is not None and (not isinstance(name, str) or name.lower().endswith(_FILES)):
        raise InvalidArgument(f"name is {name!r}; give a string that does not end as a file's: {' or '.join(_FILES)}")
    if not isinstance(needs, Needs):
        raise InvalidArgument(f"needs is {needs!r}; give nnburst.Needs(…)")
    names = [tensor.name for tensor in (*inputs, *outputs)]
    if not outputs or not all(isinstance(each, str) for each in names) or len(set(names)) != len(names):
        raise InvalidArgument(f"a function needs outputs, and its tensors need names of their own, not {names}")
    for tensor in (*inputs, *outputs):
        try:
            element_of(tensor.element, f"tensor {tensor.name!r}")
        except (TypeError, GeneralFailure):
            raise InvalidArgument(
                f"tensor {tensor.name!r} has dtype {tensor.dtype!r}; give that of numbers of 1, 2, 4 or 8 bytes, such "
                "as 'float32', or 'bool'"
            ) from None
        shape: Any = tensor.shape
        if shape is not None and not (isinstance(shape, tuple | list) and all(map(_is_dimension, shape))):
            raise InvalidArgument(
                f"tensor {tensor.name!r} has shape {shape!r}; give its dimensions in a tuple: a number, or a name or "
                "None where any size will do"
            )

    def decorate(function: Function) -> Function:
        own_name = getattr(function, "__name__", type(function).__name__)  # A callable object has no `__name__`.
        declaration = Declaration(name or own_name, tuple(inputs), tuple(outputs), needs)
        try:
            function.__nnburst__ = declaration  # type: ignore[attr-defined]
        except (AttributeError, TypeError):
            what = f"{own_name!r}, a {type(function).__name__}, has no room for a declaration"
            raise InvalidArgument(f"{what}; declare a function that calls it") from None
        return function

    return decorate


def _is_dimension(size: object) -> bool:
    return size is None or isinstance(size, str) or (type(size) is int and 0 <= size < 2**32)


class SentFunction(Struct, frozen=True):
    """A pickled function, which a program sends only to services that it has started.

    A pickle can run code, so the service unpickles it in the sandbox, when the function is first opened.
    """

    declaration: Declaration
    code: bytes

    @classmethod
    def of(cls, function: object) -> SentFunction:
        """Pickle a function that `declare` has decorated.

        Raises:
            InvalidArgument: The function is not declared, or cannot be pickled.
            DeviceUnavailable: The package cloudpickle is missing, and the function is in ``__main__``.
        """
        declaration = getattr(function, "__nnburst__", None)
        if not isinstance(declaration, Declaration):
            raise InvalidArgument(
                f"function {getattr(function, '__name__', function)!r} does not say what it takes and gives; put "
                "@nnburst.declare(inputs=[…], outputs=[…]) above it"
            )
        dumps: Callable[[object], bytes] = _pickle_by_value
        main = sys.modules.get("__mp_main__")  # `__main__` has this name in children that `multiprocessing` spawns.
        try:
            from cloudpickle import register_pickle_by_value

            if main is not None:
                register_pickle_by_value(main)
        except ImportError:
            if not {"__main__", "__mp_main__"}.isdisjoint((function.__module__, type(function).__module__)):
                raise DeviceUnavailable(
                    f"function {declaration.name!r} is sent with cloudpickle, as it is in no module that a service can "
                    "import: pip install 'nnburst[functions]', or move it into a file of its own"
                ) from None
            dumps = pickle.dumps
        try:
            code = dumps(function)
        except Exception as error:
            raise InvalidArgument(
                f"function {declaration.name!r} cannot be sent to its service: {type(error).__name__}: {error}; what "
                "belongs to one process is made or opened when the function runs"
            ) from error
        if len(code) > _MOST_BYTES:
            raise InvalidArgument(
                f"function {declaration.name!r} cannot be sent to its service: with what it refers to it has "
                f"{len(code):,} bytes, more than {_MOST_BYTES:,}; have it load large values from a file that "
                "declare(needs=Needs(read=[…])) names"
            )
        return cls(declaration, code)

    @property
    def __nnburst__(self) -> Declaration:
        return self.declaration

    def load(self) -> Callable[..., Any]:
        try:
            return pickle.loads(self.code)  # type: ignore[no-any-return]
        except Exception as error:
            why = failure_of(error).reason
            if isinstance(error, ImportError | AttributeError):
                why += "; its sandbox has the modules of this program, except those in the home directory itself: move "
                why += "such a module into a folder"
            if isinstance(error, NNBurstError):
                why = f'its module uses nnburst on import ({why}); do that below if __name__ == "__main__":'
            raise GeneralFailure(f"function {self.declaration.name!r} cannot be read in its service: {why}") from error


def _pickle_by_value(function: object) -> bytes:
    """Pickle a function by value. Raises `TypeError` if the function refers to a `Memory`.

    The pickle keeps the names of source files, for tracebacks. cloudpickle alone would replace these names.
    """
    from cloudpickle import Pickler

    def reduce_code(code: CodeType) -> tuple[object, ...]:
        make, arguments = Pickler.dispatch_table[CodeType](code)
        return make, tuple(code.co_filename if each == "<dynamic-code>" else each for each in arguments)

    def refuse(fds: FdSet) -> NoReturn:
        raise TypeError("it refers to a Memory; declare an input for the Memory, and give it to run()")

    class ByValue(Pickler):  # type: ignore[misc]
        dispatch_table: ClassVar[Any] = ChainMap({CodeType: reduce_code, FdSet: refuse}, Pickler.dispatch_table)

    ByValue(written := io.BytesIO()).dump(function)
    return written.getvalue()


def encode_functions(functions: object) -> bytes:
    """Encode one or several declared functions for a service. Raises the errors of `SentFunction.of`."""
    if not isinstance(functions, Iterable) or isinstance(functions, str) or callable(functions):
        functions = (functions,)
    return msgspec.msgpack.encode([SentFunction.of(function) for function in functions])


def decode_functions(data: bytes) -> list[SentFunction]:
    """Decode the result of `encode_functions`, without unpickling the functions."""
    return msgspec.msgpack.decode(data, type=list[SentFunction])


class FunctionDevice(LocalDevice):
    """A device that runs declared functions.

    Args:
        call: ``file.py:function`` or ``package.module:function``; several functions as a list, or joined by ``+``.

    Raises:
        DeviceUnavailable: A function does not exist, or is not declared.
        InvalidArgument: Two functions have the same name.
    """

    name = "nnburst-function"

    def __init__(self, call: str | Sequence[str] = "") -> None:
        super().__init__()
        self._functions: dict[str, Callable[..., Any] | SentFunction] = {}
        for target in filter(None, call.split("+") if isinstance(call, str) else call):
            self.add(_load(target), target)

    def add(self, function: Callable[..., Any] | SentFunction, target: str = "functions=[…]") -> None:
        """Add a function. `target` is its name in error messages."""
        name = declaration_of(function).name
        if self._functions.setdefault(name, function) is not function:
            raise InvalidArgument(f"{target}: there is a function {name!r} already; give one @declare(name=…)")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the functions, for `Service.session`."""
        return tuple(self._functions)

    @property
    def needs(self) -> Needs:
        """The union of the functions' needs: files, programs, and access to computer networks."""
        return Needs.sum(declaration_of(function).needs for function in self._functions.values())

    def get_supported_extensions(self) -> tuple[Extension, ...]:
        return (_EXTENSION,)

    def why_not(self, model: Model, operation: Operation) -> str:
        """Return why the device cannot run a model; empty for a model from `import_model`."""
        return "" if self._find(model) else f"models are one CALL of {sorted(self._functions)}, as imported"

    def import_model(self, source: str, pools: Sequence[Memory] = ()) -> ImportedModel:
        declaration = declaration_of(find_named(self._functions, source, self.name, "functions"))
        return ImportedModel(
            _model(declaration),
            (),
            tuple(tensor.shape for tensor in declaration.inputs),
            tuple(tensor.shape for tensor in declaration.outputs),
        )

    def compile(self, model: Model) -> FunctionModel:
        function = self._find(model)
        assert function is not None
        call = function.load() if isinstance(function, SentFunction) else function
        return FunctionModel(model, self._tracker, declaration_of(function), call)

    def _find(self, model: Model) -> Callable[..., Any] | SentFunction | None:
        """Return the function of a model from `import_model`; None for any other model."""
        if extension_prefix(model, EXTENSION_NAME) != _PREFIX:
            return None
        function = self._functions.get(model.operand_values.decode(errors="replace"))
        return function if function is not None and model.main == _model(declaration_of(function)).main else None


class FunctionModel(LocalModel):
    """A function that is ready to run."""

    def __init__(self, model: Model, tracker: BufferTracker, declared: Declaration, call: Callable[..., Any]) -> None:
        super().__init__(model, tracker)
        self.declaration, self.function, self.label = declared, call, declared.name

    def bind(self, request: Request, options: RunOptions) -> Kernel:
        """Return a kernel that calls the function with arrays in the request's memory."""
        function, declared = self.function, self.declaration
        inputs = [_view(*row, request) for row in zip(declared.inputs, request.inputs, strict=True)]
        outputs = [_Target(*row, request) for row in zip(declared.outputs, request.outputs, strict=True)]
        is_open = any(target.is_open for target in outputs)

        def run() -> ExecutionResult | None:
            try:
                answer = function(*inputs)
            except Exception as error:
                _log.info("%s raised an exception", declared.name, exc_info=True)
                raise _client_error(declared.name, function, error) from error
            if answer is None and outputs:
                raise GeneralFailure(f"{declared.name} returned None; return an array for each of its outputs")
            results = answer if isinstance(answer, tuple) else (answer,)
            if len(results) != len(outputs):
                raise GeneralFailure(f"{declared.name} returned {len(results)} results for {len(outputs)} outputs")
            arrays = [target.check(result) for target, result in zip(outputs, results, strict=True)]
            fits = [target.store(array) for target, array in zip(outputs, arrays, strict=True)]
            if not is_open and all(fits):
                return None
            shapes = tuple(OutputShape(array.shape, fit) for array, fit in zip(arrays, fits, strict=True))
            if not all(fits):
                raise OutputInsufficientSize(f"a result of {declared.name} needs more room", output_shapes=shapes)
            return ErrorStatus.NONE, shapes, NO_TIMING

        return run


def _client_error(name: str, function: Callable[..., Any], error: Exception) -> NNBurstError:
    """Return the client's error for an exception. The error names the traceback's last line in the function's file."""
    file = getattr(getattr(inspect.unwrap(function), "__code__", None), "co_filename", None)
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)][1:]
    at = ([place for place in lines if place[0] == file] or lines)[-1:]
    where = "".join(f" ({path}, line {line})" for path, line in at)
    status, shapes, _ = failure = failure_of(error)
    return error_for(status, f"{name}{where}: {failure.reason}", shapes)


class _Target:
    """An output of a request, to which a result is copied."""

    def __init__(self, tensor: Tensor, argument: RequestArgument, request: Request) -> None:
        self._tensor, self._argument, self._request = tensor, argument, request
        self._dimensions = combine_dimensions(tensor.dimensions, argument.dimensions)
        self.is_open = tensor.shape != () and not is_fully_specified(self._dimensions)
        if not self.is_open and not argument.has_no_value:
            self._place(self._dimensions)  # This refuses an argument that is too small or read-only.

    def check(self, result: Any) -> Array:
        array = np.asarray(result)
        known = self._dimensions
        fits = (self.is_open and not known) or (
            array.ndim == len(known) and all(k in (0, n) for k, n in zip(known, array.shape, strict=True))
        )
        if array.dtype != self._tensor.element or not fits:
            remedy = "" if array.dtype == self._tensor.element else f"; convert it: .astype('{self._tensor.element}')"
            raise GeneralFailure(
                f"output {self._tensor.name!r} is {array.dtype} {list(array.shape)}, but is declared as "
                f"{self._tensor.dtype} {list(known) if known else self._tensor.shape}{remedy}"
            )
        return array

    def store(self, array: Array) -> bool:
        """Copy a result to the output. Return False if the output's memory is too small."""
        if self._argument.has_no_value or array.size == 0:
            return True
        if self.is_open and array.nbytes > (self._argument.location.length or math.inf):
            return False
        self._place(array.shape)[...] = array
        return True

    def _place(self, shape: tuple[int, ...]) -> Array:
        array = _region("output", self._tensor, shape, self._argument, self._request)
        if not array.flags.writeable:
            raise InvalidArgument(f"output {self._tensor.name!r} lies in read-only memory; share it for writing")
        return array


def _region(kind: str, tensor: Tensor, shape: tuple[int, ...], argument: RequestArgument, request: Request) -> Array:
    """Return an array over an argument's memory. Raises `InvalidArgument` if the memory is too small."""
    nbytes = math.prod(shape) * tensor.element.itemsize
    if argument.location.length < nbytes:
        raise InvalidArgument(f"{kind} {tensor.name!r} has {argument.location.length} bytes; it needs {nbytes}")
    return pool_of(request, argument).array(tensor.element, shape, argument.location.offset)


def _view(tensor: Tensor, argument: RequestArgument, request: Request) -> Array:
    dims = combine_dimensions(tensor.dimensions, argument.dimensions)
    if argument.has_no_value:
        if 0 not in dims:
            raise GeneralFailure(f"input {tensor.name!r} is omitted, but the function needs it")
        return np.empty(dims, tensor.element)
    if tensor.shape != () and not is_fully_specified(dims):
        raise InvalidArgument(f"input {tensor.name!r} has dimensions {list(dims)}; give all of them")
    return _region("input", tensor, dims, argument, request)  # Inputs are read-only for the function.


def _load(target: str) -> Callable[..., Any]:
    """Import and return the function ``file.py:function`` or ``package.module:function``."""
    place, _, attribute = target.rpartition(":")
    if not place:
        model = f"; a model in a file is --model NAME={target}" if target.lower().endswith(_FILES) else ""
        raise DeviceUnavailable(f"{target}: give FILE.py:FUNCTION or package.module:FUNCTION{model}")
    try:
        module = _file(target, place) if place.endswith(".py") else import_module(place)
    except DeviceUnavailable:
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == place.partition(".")[0]:
            raise DeviceUnavailable(
                f"{target}: there is no module {error.name!r} where this service looks; give the path of its file "
                f"({error.name}.py:{attribute}), or name its directory in PYTHONPATH (the working directory does not "
                "count)"
            ) from None
        at = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if isinstance(error, SyntaxError) else f" ({at.filename}, line {at.lineno})"
        raise DeviceUnavailable(f"{target} cannot be imported: {type(error).__name__}: {error}{where}") from error
    found: dict[str, Any] = vars(module)
    declared = [name for name in found if isinstance(getattr(found[name], "__nnburst__", None), Declaration)]
    if attribute not in declared:
        what = f"{attribute!r} is not declared" if attribute in found else f"{place} has no {attribute!r}"
        raise DeviceUnavailable(
            f"{target}: {what}; it has the declared functions {sorted(declared)}. To declare one, put "
            "@nnburst.declare(inputs=[…], outputs=[…]) above it"
        )
    return found[attribute]  # type: ignore[no-any-return]


def _file(target: str, path: str) -> ModuleType:
    """Import a file as a top-level module, after appending the file's directory to the search path."""
    file = Path(path).resolve()
    if not file.is_file():
        raise DeviceUnavailable(f"{target}: there is no file {str(file)!r}")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    module = import_module(file.stem)
    found = getattr(module, "__file__", None)
    if found is None or not os.path.samefile(found, file):
        raise DeviceUnavailable(f"{target}: another module is called {file.stem!r} ({found}); rename the file")
    return module


def declaration_of(function: Callable[..., Any] | SentFunction) -> Declaration:
    """Return what `declare` has stored in a function. Raises `AttributeError` if the function is not declared."""
    return function.__nnburst__  # type: ignore[union-attr]


def _model(declaration: Declaration) -> Model:
    def operand(tensor: Tensor) -> OperandDesc:
        rank = None if tensor.shape is None else len(tensor.shape)
        code, scale = operand_code(element_of(tensor.element, tensor.name), rank, _PREFIX)
        return OperandDesc(code, tensor.dimensions, scale=scale)

    return call_by_name(
        declaration.name,
        _PREFIX,
        [operand(tensor) for tensor in declaration.inputs],
        [operand(tensor) for tensor in declaration.outputs],
        extension_name_to_prefix={EXTENSION_NAME: _PREFIX},
        input_names=tuple(tensor.name for tensor in declaration.inputs),
        output_names=tuple(tensor.name for tensor in declaration.outputs),
    )
