"""The device that runs models with ONNX Runtime."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

import numpy as np
from msgspec.structs import replace

from ..._core.errno import one_of
from ...cache.device_cache import VerifiedEntry
from ...cache.names import model_fingerprint
from ...cache.reasons import CacheReason, CacheRejected, SaveResult
from ...cache.sealed_copy import claim
from ...errors import GeneralFailure, InvalidArgument
from ...memory.memory import Memory
from ...memory.staging import read_constant
from ...model.extensions import Extension, ImportedModel, extension_code, extension_prefix
from ...model.types import DeviceType, Lifetime, MemoryLike, Model, Operation
from ..common import build_version, capabilities_of, extension_of_names
from ..elements import element_types
from ..encoded import Bytes
from ..interfaces import CacheFiles
from ..local import LocalDevice, LocalModel
from .capi import package_version
from .graph import Graph, GraphStore, SessionSettings, compile_graph, content_digest
from .importer import EXTENSION_NAME, FILE, GRAPH, graph_model, import_graph
from .levels import GraphOptimizationLevel
from .library import CPU, check_providers, give_memory_back, messages, onnx, require_extra
from .lowering import Lowering
from .operations import LOWERED
from .packed import FORMAT, load_graph, pack, read_contents
from .prepared import OnnxPreparedModel, Source

_log = logging.getLogger(__name__)

EXTENSION = extension_of_names(EXTENSION_NAME, *element_types())
_LARGEST_PROTO = 2**31 - 1
"""Largest size in bytes of a protobuf file."""


class OnnxRuntimeDevice(LocalDevice):
    """A device that runs graphs with ONNX Runtime, on the CPU by default.

    A model is one operation GRAPH of the extension ``org.nnburst.onnx``, or consists of NNAPI operations, which the
    device converts to a graph.

    Args:
        threads: Number of threads that work on one operation, as text; "0" for one per processor.
        spinning: "1" to let idle threads spin instead of sleeping.
        providers: ONNX Runtime's execution providers, such as "CUDAExecutionProvider" or "cuda", joined by "+". Each
            node goes to the first provider that can run it. Empty for the CPU alone.
        optimization: ONNX Runtime's name of an optimisation level, such as "ORT_DISABLE_ALL".

    Raises:
        DeviceUnavailable: The extra ``onnx`` is not installed, or ONNX Runtime has no such provider.
        InvalidArgument: ``threads`` is not a number from 0 to 1024, or another option has an unknown value.
    """

    name = "nnburst-onnxruntime"
    cache_format = FORMAT
    capabilities = capabilities_of(0.2, operation_time=9_000)
    """Capabilities: a fifth of the reference device's computing time, but a longer fixed time per operation."""

    def __init__(
        self, threads: str = "0", spinning: str = "0", providers: str = "", optimization: str = "ORT_ENABLE_ALL"
    ) -> None:
        require_extra()
        super().__init__()
        if not threads.isdecimal() or int(threads) > 1024 or spinning not in ("0", "1"):
            raise InvalidArgument(
                f"threads={threads}, spinning={spinning}: threads is 0 (one per processor) to 1024, spinning 0 or 1"
            )
        one_of(optimization, "optimization", GraphOptimizationLevel.__members__)
        chosen = check_providers(providers) if providers else ()
        self._settings = SessionSettings(int(threads), spinning == "1", chosen, optimization)
        self._graphs = GraphStore()

    @property
    def type(self) -> DeviceType:
        return DeviceType.OTHER if self._settings.providers else DeviceType.CPU

    @property
    def version_string(self) -> str:
        """Versions of nnburst, NumPy and ONNX Runtime, and the options that change results."""
        level = self._settings.optimization
        return "+".join([_version(), *self._settings.providers, *([level] if level != "ORT_ENABLE_ALL" else [])])

    def load_libraries(self, rest: bool = False) -> None:
        """Load ONNX Runtime and the classes that read its models; with `rest`, the whole package ``onnx``."""
        _ = self._settings.runtime
        _ = onnx() if rest else messages()

    def get_supported_extensions(self) -> tuple[Extension, ...]:
        return (EXTENSION,)

    def why_not(self, model: Model, operation: Operation) -> str:
        """Return why the device cannot run an operation; empty for a GRAPH that is the model's only operation."""
        alone = len(model.main.operations) == 1 and not model.referenced
        return "" if alone and _is_graph(model, operation) else f"models of {EXTENSION_NAME} are one GRAPH"

    def reasons(self, model: Model) -> Sequence[str]:
        """Return for each operation why the device cannot run it, or "". NNAPI operations need the CPU provider."""
        if extension_prefix(model, EXTENSION_NAME):
            return super().reasons(model)
        if self._settings.providers:
            return [f"operations of NNAPI are lowered for {CPU} alone"] * len(model.main.operations)
        return Lowering(model, LOWERED).reasons

    def import_model(self, source: str, pools: Sequence[Memory] = ()) -> ImportedModel:
        if source != "onnx" or len(pools) != 1:
            raise GeneralFailure(f"{self.name} reads one 'onnx' file, not {len(pools)} {source!r}; leave out device=")
        imported = import_graph(_read_file(pools[0], 0, pools[0].size))
        give_memory_back(pools[0].size)
        return imported

    def compile(self, model: Model) -> OnnxPreparedModel:
        """Compile a model, or share the graph of an earlier compilation from equal files."""
        is_file = bool(extension_prefix(model, EXTENSION_NAME))
        source = _source_of(model)
        try:
            digest = content_digest(source.data, source.files)
            graph = self._graphs.get(digest, lambda: compile_graph(source.data, source.files, self._settings))
            if is_file:
                inputs = (*graph.inputs, *graph.optional.values())
                imported = graph_model(len(source.data), tuple(source.files), inputs, graph.outputs).main
                files = model.main.operands[: 1 + len(source.files)]  # The client determines their sizes.
                if model.main != replace(imported, operands=(*files, *imported.operands[len(files) :])):
                    raise InvalidArgument("the operands of GRAPH are not those that its file was imported with")
            return OnnxPreparedModel(model, graph, self._tracker, source)
        except BaseException:
            give_memory_back(sum(pool.size for pool in model.pools))
            raise

    def save(self, prepared: LocalModel, files: CacheFiles) -> SaveResult:
        assert isinstance(prepared, OnnxPreparedModel)
        source = prepared.source
        assert source is not None

        def payloads() -> tuple[tuple[bytes], tuple[memoryview]] | None:
            try:
                graph, weights = pack(prepared.model, source.data, source.files, self._settings)
            except (CacheRejected, OSError):  # Such failures are not due to the model.
                raise
            except Exception as error:  # The compilation succeeds without caching.
                _log.warning("the optimised graph cannot be kept: %s", error)
                return None
            return (graph,), (weights.data,)

        result = self._cache.save(
            files, payloads, compiled=lambda: model_fingerprint(prepared.model, copies=source.copies)
        )
        if result.saved:  # Models restored from this entry share the graph.
            self._graphs.put(_cached_key(files.cache_key, result.generation), prepared.graph)
        return result

    def restore(self, cache_key: bytes, entry: VerifiedEntry) -> OnnxPreparedModel:
        """Restore a compilation without optimising the model again; see `LocalDevice.restore`."""
        (text,), (weights,) = entry.model, entry.data
        contents = read_contents(text)

        def load() -> Graph:
            if contents.gives_back and not claim(weights):  # Another graph, just closed, still claims the weights.
                raise CacheRejected(CacheReason.BUSY, "the memory of the weights is being given back")
            return load_graph(contents, weights, self._settings, own=True)

        graph = self._graphs.get(_cached_key(cache_key, entry.generation), load)
        return OnnxPreparedModel(contents.model, graph, self._tracker)


@cache
def _version() -> str:
    return f"{build_version()}+onnxruntime{package_version()}"


def _cached_key(cache_key: bytes, generation: bytes) -> bytes:
    return b"cached" + cache_key + generation


def _is_graph(model: Model, operation: Operation) -> bool:
    prefix = extension_prefix(model, EXTENSION_NAME)
    return bool(prefix) and operation.type == extension_code(prefix, GRAPH)


def _read_file(pool: MemoryLike, offset: int, length: int) -> bytes:
    """Copy a model file. A parser must not read bytes that a client can change meanwhile."""
    if length > _LARGEST_PROTO:
        raise InvalidArgument(f"a model file has at most {_LARGEST_PROTO} bytes, not {length}; use external data")
    return read_constant(pool, np.uint8, (length,), offset).tobytes()


def _read_files(model: Model) -> Source:
    code = extension_code(extension_prefix(model, EXTENSION_NAME), FILE)
    operation, operands = model.main.operations[0], model.main.operands
    data: bytes | None = None
    files: dict[str, Bytes] = {}
    for index in operation.inputs[: len(operation.inputs) - len(model.main.input_indexes)]:
        operand = operands[index]
        if operand.type != code or operand.lifetime != Lifetime.CONSTANT_REFERENCE:
            raise InvalidArgument(f"operand {index} of GRAPH is not a file: a constant of type {code:#x} in a pool")
        location, pool = operand.location, model.pools[operand.location.pool_index]
        length = location.length or pool.size - location.offset
        try:
            name = bytes(operand.extra_params or b"").decode()  # type: ignore[arg-type]
        except (TypeError, UnicodeDecodeError):
            raise InvalidArgument(f"operand {index} of GRAPH: the file's name is no UTF-8") from None
        if data is None:
            data = _read_file(pool, location.offset, length)
        else:
            files[name] = read_constant(pool, np.uint8, (length,), location.offset)
    data = data or b""
    contents = (np.frombuffer(data, np.uint8), *files.values())
    return Source(data, files, dict(zip(operation.inputs, contents, strict=False)))


def _source_of(model: Model) -> Source:
    if extension_prefix(model, EXTENSION_NAME):
        return _read_files(model)
    lowering = Lowering(model, LOWERED)
    return Source(*lowering.graph(), lowering.copies)
