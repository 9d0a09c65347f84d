"""Models and requests: operand and operation tables, values, the builder, validation."""

from __future__ import annotations

from ..errors import OutputShape
from ._builder import INLINE_LIMIT, GraphBuilder, PoolFactory, provide_pools
from ._dimensions import HIGHEST_RANK, combine_dimensions, element_count, is_fully_specified
from ._extensions import (
    Extension,
    ExtensionOperandType,
    ImportedModel,
    OpenShape,
    extension_code,
    extension_operand_type,
    extension_prefix,
)
from ._lookup import view_operation
from ._memory_like import MemoryLike
from ._methods import METHODS
from ._model_builder import ModelBuilder
from ._operand_types import (
    OPERANDS,
    HalVersion,
    OperandInfo,
    OperandType,
    is_extension,
    operand_info,
    operand_nbytes,
    type_name,
)
from ._operation_types import FusedActivation, OperationType, PaddingScheme, operation_name, operation_since
from ._operation_view import OperationView, OutputSpec, UnknownYet
from ._operations import OPERATIONS, OperationInfo
from ._partition import Part, cut, has_known_size, regions
from ._performance import NEVER, operation_cost
from ._running import ExecutionResult, Failure, RunOptions, consistent_result, failure_of, reason_of
from ._signature import Match, Param, Signature, match_signature
from ._types import (
    MAX_OPERANDS,
    NO_TIMING,
    UINT64_MAX,
    BufferDesc,
    BufferRole,
    BufferToken,
    Capabilities,
    DataLocation,
    DeviceStatus,
    DeviceType,
    ExecutionPreference,
    Lifetime,
    MeasureTiming,
    Model,
    Operand,
    Operation,
    PerformanceInfo,
    Priority,
    Request,
    RequestArgument,
    Subgraph,
    SymmPerChannelQuantParams,
    Timing,
)
from ._validate import POOL_KINDS, validate_model
from ._validate_request import validate_request
from ._window import Axis, WindowGeometry, image_dims, transposed_axes, window_geometry
from .rows.shape import pad_widths, slice_bounds, strided_slices

__all__ = [
    "HIGHEST_RANK",
    "INLINE_LIMIT",
    "MAX_OPERANDS",
    "METHODS",
    "NEVER",
    "NO_TIMING",
    "OPERANDS",
    "OPERATIONS",
    "POOL_KINDS",
    "UINT64_MAX",
    "Axis",
    "BufferDesc",
    "BufferRole",
    "BufferToken",
    "Capabilities",
    "DataLocation",
    "DeviceStatus",
    "DeviceType",
    "ExecutionPreference",
    "ExecutionResult",
    "Extension",
    "ExtensionOperandType",
    "Failure",
    "FusedActivation",
    "GraphBuilder",
    "HalVersion",
    "ImportedModel",
    "Lifetime",
    "Match",
    "MeasureTiming",
    "MemoryLike",
    "Model",
    "ModelBuilder",
    "OpenShape",
    "Operand",
    "OperandInfo",
    "OperandType",
    "Operation",
    "OperationInfo",
    "OperationType",
    "OperationView",
    "OutputShape",
    "OutputSpec",
    "PaddingScheme",
    "Param",
    "Part",
    "PerformanceInfo",
    "PoolFactory",
    "Priority",
    "Request",
    "RequestArgument",
    "RunOptions",
    "Signature",
    "Subgraph",
    "SymmPerChannelQuantParams",
    "Timing",
    "UnknownYet",
    "WindowGeometry",
    "combine_dimensions",
    "consistent_result",
    "cut",
    "element_count",
    "extension_code",
    "extension_operand_type",
    "extension_prefix",
    "failure_of",
    "has_known_size",
    "image_dims",
    "is_extension",
    "is_fully_specified",
    "match_signature",
    "operand_info",
    "operand_nbytes",
    "operation_cost",
    "operation_name",
    "operation_since",
    "pad_widths",
    "provide_pools",
    "reason_of",
    "regions",
    "slice_bounds",
    "strided_slices",
    "transposed_axes",
    "type_name",
    "validate_model",
    "validate_request",
    "view_operation",
    "window_geometry",
]
