"""The operation table, part: convolutions, pooling operations and FULLY_CONNECTED."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from ...errors import InvalidArgument
from ..dimensions import element_count
from ..operation_types import OperationType
from ..operation_view import OperationView, Signature
from ..signature import signature
from ..window import transposed_axes, window_geometry
from .common import FLOAT, FLOAT_QUANT8, LATE_FLOAT_QUANT8, Outputs, check_activation, like_data, require_equal


def _check_bias(view: OperationView, channel_dim: int = 0) -> None:
    """Check the scale of the bias and the channel dimension of a per-channel filter."""
    if not view.info.is_quantised:
        return
    x, filter_, bias = view.operand("x"), view.operand("filter"), view.operand("bias")
    channels = view.channel_scales("filter")
    if channels is not None and channels[1] != channel_dim:
        raise InvalidArgument(f"the filter's channel dimension is {channels[1]}; it must be {channel_dim}")
    wanted = 0.0 if channels is not None else x.scale * filter_.scale
    if bias.zero_point != 0 or not math.isclose(bias.scale, wanted, rel_tol=1e-5, abs_tol=0.0):
        raise InvalidArgument(
            f"the bias has scale {bias.scale:g} and zero point {bias.zero_point}; they must be {wanted:g} and 0"
            " (input scale x filter scale, or 0 with a per-channel filter)"
        )


def _infer_conv(view: OperationView) -> Outputs:
    """Infer the output of a convolution with a filter [co, fh, fw, ci / groups]."""
    check_activation(view)
    co, fh, fw, ci = view.dims("filter")
    groups = view.integer("groups", 1, least=1)
    geometry = window_geometry(view, fh, fw)
    require_equal("the filter's input depth", ci * groups, geometry.channels, view.partial)
    require_equal("the bias' length", view.dims("bias")[0], co, view.partial)
    if co % groups:
        raise InvalidArgument(f"{co} output channels cannot be split into {groups} groups")
    return like_data(view, geometry.output_dims(co))


def _infer_depthwise_conv(view: OperationView) -> Outputs:
    """Infer the output of a depthwise convolution with a filter [1, fh, fw, ci x multiplier]."""
    check_activation(view)
    one, fh, fw, co = view.dims("filter")
    geometry = window_geometry(view, fh, fw)
    multiplier = view.integer("multiplier", least=1)
    require_equal("the filter's first dimension", one, 1, view.partial)
    require_equal("the filter's depth", co, geometry.channels * multiplier, view.partial)
    require_equal("the bias' length", view.dims("bias")[0], co, view.partial)
    return like_data(view, geometry.output_dims(co))


def _infer_transpose_conv(view: OperationView) -> Outputs:
    """Infer the output of a transposed convolution with a filter [co, fh, fw, ci]."""
    check_activation(view)
    co, fh, fw, ci = view.dims("filter")
    geometry = transposed_axes(view, fh, fw)
    require_equal("the filter's input depth", ci, geometry.channels, view.partial)
    require_equal("the bias' length", view.dims("bias")[0], co, view.partial)
    return like_data(view, geometry.output_dims(co))


def _infer_pool(view: OperationView) -> Outputs:
    """Infer the output of a pooling operation, after checking that every window touches the image."""
    check_activation(view)
    geometry = window_geometry(view, view.integer("filter_h", least=1), view.integer("filter_w", least=1))
    for axis in (geometry.height, geometry.width):
        if max(axis.head, axis.tail) >= axis.filter:
            raise InvalidArgument(f"padding {axis.head}, {axis.tail} must be smaller than the filter, {axis.filter}")
    return like_data(view, geometry.output_dims(geometry.channels))


def _infer_fully_connected(view: OperationView) -> Outputs:
    """Infer the output of FULLY_CONNECTED, which reshapes x to [-1, n]. n is the filter's second dimension."""
    check_activation(view)
    dims = view.dims("x")
    if len(dims) < 2:
        raise InvalidArgument(f"x has rank {len(dims)}; it must be 2 to 4")
    units, size = view.dims("filter")
    require_equal("the bias' length", view.dims("bias")[0], units, view.partial)
    if view.partial and (0 in dims or size == 0):
        return like_data(view, (0, units))
    if size < 1:
        raise InvalidArgument("the filter's input size is 0")
    count = element_count(dims)
    if count % size:
        raise InvalidArgument(f"x has {count} elements, not a multiple of the filter's input size {size}")
    return like_data(view, (count // size, units))


_EXPLICIT = "pad_left:i32 pad_right:i32 pad_top:i32 pad_bottom:i32 stride_w:i32 stride_h:i32"
_IMPLICIT = "scheme:i32 stride_w:i32 stride_h:i32"
_LAYOUT = "[nchw:bool@1.2]"
_LAYOUT_DILATION = "[nchw:bool@1.2 [dilation_w:i32 dilation_h:i32]]"
_FILTERED = "x/4:T filter/4:W bias/1:B"


def _both_paddings(before: str, after: str) -> list[str]:
    return [f"{before} {padding} {after}" for padding in (_EXPLICIT, _IMPLICIT)]


def _pool(types: str) -> Signature:
    forms = _both_paddings("x/4:T", f"filter_w:i32 filter_h:i32 act:i32 {_LAYOUT}")
    return signature(forms, types, _infer_pool, "out:T=x", zero_sized=True)


def _late_conv_signature(forms: Sequence[str], infer: Callable[[OperationView], Outputs] = _infer_conv) -> Signature:
    return signature(forms, LATE_FLOAT_QUANT8, infer, check=_check_bias, zero_sized=True)


_O = OperationType

ROWS: dict[OperationType, Signature] = {
    _O.AVERAGE_POOL_2D: _pool(FLOAT_QUANT8),
    _O.CONV_2D: signature(
        _both_paddings(_FILTERED, f"act:i32 {_LAYOUT_DILATION}"),
        FLOAT_QUANT8,
        _infer_conv,
        check=_check_bias,
        zero_sized=True,
    ),
    _O.DEPTHWISE_CONV_2D: signature(
        _both_paddings(_FILTERED, f"multiplier:i32 act:i32 {_LAYOUT_DILATION}"),
        FLOAT_QUANT8,
        _infer_depthwise_conv,
        check=partial(_check_bias, channel_dim=3),
        zero_sized=True,
    ),
    _O.FULLY_CONNECTED: signature(
        "x/2-4:T filter/2:T bias/1:B act:i32", FLOAT_QUANT8, _infer_fully_connected, check=_check_bias, zero_sized=True
    ),
    _O.GROUPED_CONV_2D: _late_conv_signature(_both_paddings(_FILTERED, "groups:i32 act:i32 nchw:bool")),
    _O.L2_POOL_2D: _pool(FLOAT),
    _O.MAX_POOL_2D: _pool(FLOAT_QUANT8),
    _O.TRANSPOSE_CONV_2D: _late_conv_signature(
        (f"{_FILTERED} {_EXPLICIT} act:i32 nchw:bool", f"{_FILTERED} out_shape/1:I32 {_IMPLICIT} act:i32 nchw:bool"),
        _infer_transpose_conv,
    ),
}
