"""Models and requests: operand and operation tables, values, the builder, validation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import attach

if TYPE_CHECKING:
    from ..errors import OutputShape
    from ._validate_request import validate_request
    from .builder import INLINE_LIMIT, GraphBuilder
    from .dimensions import HIGHEST_RANK, combine_dimensions, element_count, is_fully_specified
    from .extensions import (
        Extension,
        ExtensionOperandType,
        ImportedModel,
        OpenShape,
        extension_code,
        extension_operand_type,
        extension_prefix,
    )
    from .methods import METHODS, Output
    from .model_builder import ModelBuilder
    from .operand import Operand
    from .operand_types import (
        OPERANDS,
        HalVersion,
        OperandInfo,
        OperandType,
        is_extension,
        operand_info,
        operand_nbytes,
        type_name,
    )
    from .operation_types import FusedActivation, OperationType, PaddingScheme, operation_name, operation_since
    from .operation_view import Match, OperationView, OutputSpec, Param, Signature, UnknownYet
    from .operations import OPERATIONS, OperationInfo, view_operation
    from .partition import Part, cut, has_known_size, regions
    from .performance import NEVER, operation_cost
    from .pools import PoolFactory, provide_pools
    from .rows.shape import pad_widths, slice_bounds, strided_slices
    from .running import ExecutionResult, Failure, RunOptions, consistent_result, failure_of, reason_of, took_too_long
    from .signature import match_signature
    from .types import (
        MAX_OPERANDS,
        MOST_STEPS,
        NO_TIMING,
        UINT64_MAX,
        Array,
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
        MemoryLike,
        Model,
        Named,
        OperandDesc,
        Operation,
        PerformanceInfo,
        Priority,
        Request,
        RequestArgument,
        Steps,
        Subgraph,
        SymmPerChannelQuantParams,
        Timing,
    )
    from .validate import POOL_KINDS, validate_model
    from .window import Axis, WindowGeometry, image_dims, transposed_axes, window_geometry
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "..errors": "OutputShape",
            "._validate_request": "validate_request",
            ".builder": "INLINE_LIMIT GraphBuilder",
            ".dimensions": "HIGHEST_RANK combine_dimensions element_count is_fully_specified",
            ".extensions": (
                "Extension ExtensionOperandType ImportedModel OpenShape extension_code extension_operand_type "
                "extension_prefix"
            ),
            ".methods": "METHODS Output",
            ".model_builder": "ModelBuilder",
            ".operand": "Operand",
            ".operand_types": (
                "OPERANDS HalVersion OperandInfo OperandType is_extension operand_info operand_nbytes type_name"
            ),
            ".operation_types": "FusedActivation OperationType PaddingScheme operation_name operation_since",
            ".operation_view": "Match OperationView OutputSpec Param Signature UnknownYet",
            ".operations": "OPERATIONS OperationInfo view_operation",
            ".partition": "Part cut has_known_size regions",
            ".performance": "NEVER operation_cost",
            ".pools": "PoolFactory provide_pools",
            ".rows.shape": "pad_widths slice_bounds strided_slices",
            ".running": "ExecutionResult Failure RunOptions consistent_result failure_of reason_of took_too_long",
            ".signature": "match_signature",
            ".types": (
                "MAX_OPERANDS MOST_STEPS NO_TIMING UINT64_MAX Array BufferDesc BufferRole BufferToken Capabilities "
                "DataLocation DeviceStatus DeviceType ExecutionPreference Lifetime MeasureTiming MemoryLike Model "
                "Named OperandDesc Operation PerformanceInfo Priority Request RequestArgument Steps Subgraph "
                "SymmPerChannelQuantParams Timing"
            ),
            ".validate": "POOL_KINDS validate_model",
            ".window": "Axis WindowGeometry image_dims transposed_axes window_geometry",
        },
    )

__all__ = [
    "HIGHEST_RANK",
    "INLINE_LIMIT",
    "MAX_OPERANDS",
    "METHODS",
    "MOST_STEPS",
    "NEVER",
    "NO_TIMING",
    "OPERANDS",
    "OPERATIONS",
    "POOL_KINDS",
    "UINT64_MAX",
    "Array",
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
    "Named",
    "OpenShape",
    "Operand",
    "OperandDesc",
    "OperandInfo",
    "OperandType",
    "Operation",
    "OperationInfo",
    "OperationType",
    "OperationView",
    "Output",
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
    "Steps",
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
    "took_too_long",
    "transposed_axes",
    "type_name",
    "validate_model",
    "validate_request",
    "view_operation",
    "window_geometry",
]
