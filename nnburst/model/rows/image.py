"""The operation table, part: operations that resize images, or move blocks between depth, batch and space."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ...errors import InvalidArgument
from ..operation_types import OperationType
from ..operation_view import OperationView, Signature
from ..signature import signature
from ..window import image_dims
from .common import FLOAT_QUANT8, FLOAT_QUANT8_LATE, LATE_FLOAT_QUANT8, Outputs, add, like_data
from .shape import pad_widths


def _like_image(view: OperationView, batch: int, height: int, width: int, channels: int) -> Outputs:
    nchw = bool(view.integer("nchw", 0))
    return like_data(view, (batch, channels, height, width) if nchw else (batch, height, width, channels))


def _divide(what: str, size: int, by: int) -> int:
    if size % by:
        raise InvalidArgument(f"{what} {size} is no multiple of {by}")
    return size // by


def _infer_depth_to_space(view: OperationView) -> Outputs:
    (b, h, w, c, _), block = image_dims(view), view.integer("block", least=1)
    return _like_image(view, b, h * block, w * block, _divide("depth", c, block * block))


def _infer_space_to_depth(view: OperationView) -> Outputs:
    (b, h, w, c, _), block = image_dims(view), view.integer("block", least=1)
    return _like_image(view, b, _divide("height", h, block), _divide("width", w, block), c * block * block)


def _block(view: OperationView) -> tuple[int, int]:
    numbers = view.integers("block")
    if len(numbers) != 2 or min(numbers) < 1:
        raise InvalidArgument(f"block {numbers} must be two positive numbers")
    return numbers[0], numbers[1]


def _infer_batch_to_space(view: OperationView) -> Outputs:
    (b, h, w, c, _), (down, right) = image_dims(view), _block(view)
    return _like_image(view, _divide("batch", b, down * right), h * down, w * right, c)


def _infer_space_to_batch(view: OperationView) -> Outputs:
    (b, h, w, c, _), (down, right) = image_dims(view), _block(view)
    (top, bottom), (left, right_pad) = pad_widths(view, 2)
    height = _divide("padded height", add(view, h, top + bottom), down)
    width = _divide("padded width", add(view, w, left + right_pad), right)
    return _like_image(view, b * down * right, height, width, c)


def _infer_resize(view: OperationView) -> Outputs:
    """Infer the output's size. Integer inputs are the size; floating-point inputs are factors of the image's size."""
    b, h, w, c, _ = image_dims(view)
    if view.integer("align_corners", 0) and view.integer("half_pixel", 0):
        raise InvalidArgument("align_corners and half_pixel exclude each other")
    if view.count("width"):
        width, height = view.integer("width", least=1), view.integer("height", least=1)
        return _like_image(view, b, height, width, c)
    sizes = []
    for name, size in (("factor_h", h), ("factor_w", w)):
        factor = view.number(name)
        if not (math.isfinite(factor) and factor > 0):
            raise InvalidArgument(f"{name} is {factor:g}; it must be positive")
        sizes.append(math.floor(np.float32(size) * np.float32(factor)))
        if sizes[-1] < 1 and not (view.partial and size == 0):
            raise InvalidArgument(f"nothing is left of {size} elements by the factor {factor:g}")
    return _like_image(view, b, sizes[0], sizes[1], c)


def _image_signature(form: str, infer: Callable[[OperationView], Outputs]) -> Signature:
    return signature(f"{form} [nchw:bool@1.2]", FLOAT_QUANT8, infer, "out:T=x")


def _resize(types: str, options: str) -> Signature:
    forms = [f"x/4:T width:i32 height:i32 {options}", f"x/4:T factor_w:fx@1.2 factor_h:fx {options}"]
    return signature(forms, types, _infer_resize, "out:T=x", zero_sized=True)


_FLAGS = "[align_corners:bool@1.3 [half_pixel:bool]]"
_O = OperationType

ROWS: dict[OperationType, Signature] = {
    _O.BATCH_TO_SPACE_ND: _image_signature("x/4:T block/1:I32", _infer_batch_to_space),
    _O.DEPTH_TO_SPACE: _image_signature("x/4:T block:i32", _infer_depth_to_space),
    _O.RESIZE_BILINEAR: _resize(FLOAT_QUANT8_LATE, f"[nchw:bool@1.2 {_FLAGS}]"),
    _O.RESIZE_NEAREST_NEIGHBOR: _resize(LATE_FLOAT_QUANT8, f"nchw:bool {_FLAGS}"),
    _O.SPACE_TO_BATCH_ND: _image_signature("x/4:T block/1:I32 pads/2:I32", _infer_space_to_batch),
    _O.SPACE_TO_DEPTH: _image_signature("x/4:T block:i32", _infer_space_to_depth),
}
