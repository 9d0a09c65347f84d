"""A device that runs ``.tflite`` files with LiteRT. It needs the extra ``litert``.

A model is one operation of the extension ``org.nnburst.litert``. Its operands are the file, then the inputs. An
interpreter stores variables between runs, so each prepared model has its own interpreter, and runs one request at a
time. A run copies inputs into the interpreter and results out of it, since clients can change shared memory.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import numpy as np
from msgspec.structs import replace

from ..errors import DeviceUnavailable, GeneralFailure, InvalidArgument
from ..memory.memory import Memory
from ..memory.staging import read_constant
from ..model.dimensions import HIGHEST_RANK
from ..model.extensions import Extension, ImportedModel, extension_code, extension_prefix
from ..model.operand_types import is_extension, operand_info
from ..model.types import Array, DataLocation, Lifetime, Model, OperandDesc, Operation
from .common import build_version, extension_of_names, one_operation
from .elements import element_of, element_types, operand_code
from .function import Declaration, FunctionModel, Tensor
from .local import LocalDevice

EXTENSION_NAME = "org.nnburst.litert"
_PREFIX = 1
_CODE = extension_code(_PREFIX, 0)
"""Code of the operation. The file's operand type has the same code."""
_EXTENSION = extension_of_names(EXTENSION_NAME, *element_types())
_PACKAGE = "ai_edge_litert"

Details = Mapping[str, Mapping[str, Any]]
"""LiteRT's descriptions of tensors, keyed by the tensors' names."""


class LitertDevice(LocalDevice):
    """A device that runs ``.tflite`` files on the CPU. Caches nothing, since LiteRT has no compiled form.

    Args:
        threads: Number of threads that work on one operation, as text; "0" for LiteRT's own choice.
        signature: Name of the signature to run, if a file has several.

    Raises:
        DeviceUnavailable: The extra ``litert`` is not installed.
        InvalidArgument: ``threads`` is not a number from 0 to 1024.
    """

    name = "nnburst-litert"

    def __init__(self, threads: str = "0", signature: str = "") -> None:
        if find_spec(_PACKAGE) is None:
            raise DeviceUnavailable(f"the device {self.name} needs {_PACKAGE}: pip install 'nnburst[litert]'")
        super().__init__()
        if not threads.isdecimal() or int(threads) > 1024:
            raise InvalidArgument(f"threads={threads}: give 0 (LiteRT's own choice) to 1024")
        self._options = int(threads), signature

    @property
    def version_string(self) -> str:
        """Versions of nnburst, NumPy and LiteRT."""
        return f"{build_version()}+litert{version(_PACKAGE.replace('_', '-'))}"

    def load_libraries(self, rest: bool = False) -> None:
        _interpreters()

    def get_supported_extensions(self) -> tuple[Extension, ...]:
        return (_EXTENSION,)

    def why_not(self, model: Model, operation: Operation) -> str:
        """Return why the device cannot run an operation; empty if it can.

        The device runs only models that it has imported from a file. Such a model has a single operation.
        """
        is_file = extension_prefix(model, EXTENSION_NAME) == _PREFIX and operation.type == _CODE
        is_file = is_file and len(model.main.operations) == 1 and not model.referenced
        return "" if is_file else f"models of {EXTENSION_NAME} are one file, as imported"

    def import_model(self, source: str, pools: Sequence[Memory] = ()) -> ImportedModel:
        if source != "tflite" or len(pools) != 1:
            raise GeneralFailure(f"{self.name} reads one 'tflite' file, not {len(pools)} {source!r}; leave out device=")
        network = _Network(read_constant(pools[0], np.uint8, (pools[0].size,), 0).tobytes(), *self._options)
        declared = network.__nnburst__
        return ImportedModel(
            network.model,
            ("",),
            tuple(tensor.shape for tensor in declared.inputs),
            tuple(tensor.shape for tensor in declared.outputs),
        )

    def compile(self, model: Model) -> FunctionModel:
        """Compile a private copy of the file, because a client could change the file during parsing."""
        file = model.main.operands[model.main.operations[0].inputs[0]]
        if file.type != _CODE or file.lifetime != Lifetime.CONSTANT_REFERENCE:
            raise InvalidArgument(f"the first operand is not a file: a constant of type {_CODE:#x} in a pool")
        place, pool = file.location, model.pools[file.location.pool_index]
        data = read_constant(pool, np.uint8, (place.length or pool.size - place.offset,), place.offset).tobytes()
        network = _Network(data, *self._options, for_runs=True)
        imported = network.model.main
        if model.main != replace(imported, operands=(model.main.operands[0], *imported.operands[1:])):
            raise InvalidArgument("the operands are not those that the file was imported with")
        return FunctionModel(model, self._tracker, network.__nnburst__, network)


class _Network:
    """A LiteRT interpreter for a file, callable with arrays.

    Args:
        data: Bytes of the file.
        threads, signature: See `LitertDevice`.
        for_runs: True to prepare for the first run, if all shapes are known.

    Attributes:
        model: The model of the file, without pools.
    """

    def __init__(self, data: bytes, threads: int, signature: str, *, for_runs: bool = False) -> None:
        try:
            self._interpreter = _interpreters().Interpreter(model_content=data, num_threads=threads or None)
            signatures = self._interpreter.get_signature_list()
            inputs, outputs = self._interpreter.get_input_details(), self._interpreter.get_output_details()
        except (ValueError, RuntimeError) as error:
            raise InvalidArgument(f"LiteRT cannot read this as a .tflite file: {error}") from None
        if signature and signature not in signatures:
            raise InvalidArgument(f"the model has no signature {signature!r}; it has {sorted(signatures)}")
        if len(signatures) > 1 and not signature:
            raise InvalidArgument(
                f"the model has the signatures {sorted(signatures)}; choose one: device='nnburst-litert:signature=…'"
            )
        self._runner = None
        self._inputs: Details = {each["name"]: each for each in inputs}
        self._outputs: Details = {each["name"]: each for each in outputs}
        if for_runs and all(size > 0 for each in inputs for size in each["shape_signature"]):
            try:
                self._interpreter.allocate_tensors()  # This is not possible after a runner is made.
            except (ValueError, RuntimeError) as error:
                raise GeneralFailure(f"LiteRT cannot run this model: {error}") from None
        if signatures:
            self._runner = self._interpreter.get_signature_runner(signature or next(iter(signatures)))
            self._inputs, self._outputs = self._runner.get_input_details(), self._runner.get_output_details()
        elif len(self._inputs) < len(inputs) or len(self._outputs) < len(outputs):
            raise GeneralFailure("several inputs or outputs of the model have one name")
        if not self._outputs:
            raise InvalidArgument("the model has no output")
        input_tensors, output_tensors = _tensors(self._inputs), _tensors(self._outputs)
        self.__nnburst__ = Declaration("the model", input_tensors, output_tensors)
        self.model = one_operation(
            _CODE,
            [OperandDesc(_CODE, lifetime=Lifetime.CONSTANT_REFERENCE, location=DataLocation(0, 0, 0))],
            [_operand(tensor, self._inputs[tensor.name]) for tensor in input_tensors],
            [_operand(tensor, self._outputs[tensor.name]) for tensor in output_tensors],
            extension_name_to_prefix={EXTENSION_NAME: _PREFIX},
            input_names=tuple(self._inputs),
            output_names=tuple(self._outputs),
        )
        self._lock = threading.Lock()

    def __call__(self, *arrays: Array) -> tuple[Array, ...]:
        """Run the model once and return copies of the outputs."""
        with self._lock:
            try:
                if self._runner is not None:
                    results = self._runner(**dict(zip(self._inputs, arrays, strict=True)))
                    return tuple(results[name] for name in self._outputs)
                return self._run_tensors(arrays)
            except (ValueError, RuntimeError) as error:
                shapes = {name: array.shape for name, array in zip(self._inputs, arrays, strict=True)}
                raise GeneralFailure(f"LiteRT cannot run inputs of the shapes {shapes}: {error}") from None

    def _run_tensors(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        interpreter, indexes = self._interpreter, [each["index"] for each in self._inputs.values()]
        for index, array in zip(indexes, arrays, strict=True):
            interpreter.resize_tensor_input(index, array.shape)  # An unchanged shape costs nothing.
        interpreter.allocate_tensors()
        for index, array in zip(indexes, arrays, strict=True):
            interpreter.set_tensor(index, array)
        interpreter.invoke()
        return tuple(interpreter.get_tensor(each["index"]) for each in self._outputs.values())


def _tensors(details: Details) -> tuple[Tensor, ...]:
    """Convert LiteRT's descriptions to `Tensor` values. A tensor described without dimensions can have any rank."""
    found = []
    for name, each in details.items():
        place, dtype = f"tensor {name!r}", np.dtype(each["dtype"])
        element_of(dtype, place)
        shape = tuple(None if size < 0 else int(size) for size in each["shape_signature"])
        if len(shape) > HIGHEST_RANK:
            raise GeneralFailure(
                f"{place} has {len(shape)} dimensions; at most {HIGHEST_RANK} can be passed to a model"
            )
        found.append(Tensor(name, dtype.name, shape or None))
    return tuple(found)


def _operand(tensor: Tensor, details: Mapping[str, Any]) -> OperandDesc:
    rank = None if tensor.shape is None else len(tensor.shape)
    code, unit = operand_code(element_of(tensor.element, tensor.name), rank, _PREFIX)
    scale, zero_point = details["quantization"]
    if not scale or is_extension(code) or not operand_info(code).is_quantised:
        return OperandDesc(code, tensor.dimensions, scale=unit)
    return OperandDesc(code, tensor.dimensions, scale=float(scale), zero_point=int(zero_point))


@cache
def _interpreters() -> Any:
    return import_module(f"{_PACKAGE}.interpreter")
