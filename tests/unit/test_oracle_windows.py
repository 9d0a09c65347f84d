"""Convolutions, pools and FULLY_CONNECTED with sizes, strides, paddings and layouts at random, against ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nnburst import ModelBuilder
from nnburst.errors import ErrorStatus
from support.operations import F16, F32, FLOATS, Q8, Q8S, REALS, Array, Case, O, T, decoded, encoded, run_model
from support.oracles import Dice, by_onnx, drawn, to_nchw, to_nhwc

LIMITS: dict[int, Callable[[Array], Array]] = {
    0: lambda x: x,
    1: lambda x: np.maximum(x, 0),
    2: lambda x: np.clip(x, -1, 1),
    3: lambda x: np.clip(x, 0, 6),
}


class Window:
    """Sizes of an image and of what slides over it, and its inputs in NNAPI's order."""

    def __init__(self, dice: Dice, *, dilated: bool = False, pool: bool = False) -> None:
        self.h, self.w = dice.upto(3), dice.upto(3)
        self.stride = (dice.upto(3), dice.upto(3))
        self.dilation = (dice.upto(2), dice.upto(2)) if dilated and dice.truth() else (1, 1)
        self.size = (dice.upto(8, 5), dice.upto(8, 5))
        self.scheme = dice.one([0, 1, 2])
        self.act = dice.upto(3, 0)
        self.nchw = dice.truth()
        extents = [(f - 1) * d + 1 for f, d in zip((self.h, self.w), self.dilation, strict=True)]
        if self.scheme == 0:
            most = [self.h - 1, self.w - 1] if pool else [2, 2]
            self.pads = [(dice.upto(m, 0), dice.upto(m, 0)) for m in most]
        elif self.scheme == 1:
            whole = [
                max(0, (-(-n // s) - 1) * s + e - n) for n, s, e in zip(self.size, self.stride, extents, strict=True)
            ]
            self.pads = [(n // 2, n - n // 2) for n in whole]
        else:
            self.pads = [(0, 0), (0, 0)]

    @property
    def padding(self) -> list[int]:
        strides = [self.stride[1], self.stride[0]]
        return [*self.pads[1], *self.pads[0], *strides] if self.scheme == 0 else [self.scheme, *strides]

    @property
    def options(self) -> list[Any]:
        """Layout and dilation; left out where they are the defaults and nothing follows."""
        if self.dilation != (1, 1):
            return [self.nchw, self.dilation[1], self.dilation[0]]
        return [self.nchw] if self.nchw else []

    @property
    def onnx(self) -> dict[str, Any]:
        (top, bottom), (left, right) = self.pads
        return {"pads": [top, left, bottom, right], "strides": list(self.stride)}

    def image(self, x: Array) -> Array:
        return to_nchw(x) if self.nchw else x

    def in_nchw(self, x: Array) -> Array:
        return x if self.nchw else to_nchw(x)

    def result(self, y: Array) -> Array:
        return LIMITS[self.act](y if self.nchw else to_nhwc(y))


def integers_agree(
    operation: O, dice: Dice, x: Array, w: Array, b: Array, rest: list[Any], channel: int, wanted: Any
) -> None:
    """Compare quantised data to the last bit: bias in 32 bits, filter per tensor or per channel.

    Scales are powers of two, so that ONNX Runtime's sums in float32 are exact.
    """
    kind, per_channel = dice.one([Q8, Q8S]), dice.truth() and operation is not O.FULLY_CONNECTED
    zero = 128 if kind == Q8 else 0
    x_zero, w_zero = zero + dice.upto(40, -40), zero + dice.upto(40, -40)
    x_scale, w_scale = 1 / 64, 1 / 64
    xs = encoded(x, kind, x_scale, x_zero)
    builder = ModelBuilder()
    operands = [builder.input("x", kind, x.shape, scale=x_scale, zero_point=x_zero)]
    if per_channel:
        scales = np.float32(2.0 ** -dice.rng.integers(5, 8, w.shape[channel]))
        shape = [1] * w.ndim
        shape[channel] = -1
        ws = np.clip(np.round(w / scales.reshape(shape)), -127, 127).astype(np.int8)
        real_w = ws * scales.reshape(shape).astype(np.float64)
        operands.append(builder.constant(ws, channel_scales=scales, channel_dim=channel))
        b_scale: Any = scales.astype(np.float64) * x_scale
        said = 0.0
    else:
        ws = encoded(w, kind, w_scale, w_zero)
        real_w = decoded(ws, w_scale, w_zero)
        operands.append(builder.constant(ws, kind, scale=w_scale, zero_point=w_zero))
        b_scale = said = x_scale * w_scale
    bs = np.round(b / b_scale).astype(np.int32)
    index = builder.add_operand(T.TENSOR_INT32, bs.shape, scale=said)
    builder.set_operand_value(index, bs)
    operands.append(builder.operand(index))
    operands += [builder.constant(v) if isinstance(v, np.ndarray) else builder.scalar(v) for v in rest]
    want = wanted(decoded(xs, x_scale, x_zero), real_w, bs * b_scale)
    step = 2.0 ** np.ceil(np.log2(max(float(np.abs(want).max()), 0.1) / 200))  # so that some are cut
    (out,) = builder.operation(operation, *operands, outputs=[{"scale": step, "zero_point": zero}])
    builder.output("y", out)
    status, (found,), _ = run_model(builder.build(), [xs])
    assert status is ErrorStatus.NONE
    np.testing.assert_array_equal(found, encoded(want, kind, step, zero))


@drawn
def test_conv_2d(dice: Dice) -> None:
    g, ci, co = Window(dice, dilated=True), dice.upto(4), dice.upto(5)
    x, w, b = dice.reals(dice.upto(2), *g.size, ci), dice.reals(co, g.h, g.w, ci), dice.reals(co)

    def wanted(x: Array, w: Array, b: Array) -> Array:
        return g.result(by_onnx("Conv", g.in_nchw(x), to_nchw(w), b, dilations=list(g.dilation), **g.onnx))

    rest = [*g.padding, g.act, *g.options]
    Case(O.CONV_2D, g.image(x), w, b, *rest).check(wanted, (F32,))
    integers_agree(O.CONV_2D, dice, g.image(x), w, b, rest, 0, wanted)


@drawn
def test_grouped_conv_2d(dice: Dice) -> None:
    g, groups, ci, per = Window(dice), dice.upto(3), dice.upto(3), dice.upto(3)
    x = dice.reals(dice.upto(2), *g.size, ci * groups)
    w, b = dice.reals(per * groups, g.h, g.w, ci), dice.reals(per * groups)

    def wanted(x: Array, w: Array, b: Array) -> Array:
        return g.result(by_onnx("Conv", g.in_nchw(x), to_nchw(w), b, group=groups, **g.onnx))

    rest = [*g.padding, groups, g.act, g.nchw]
    Case(O.GROUPED_CONV_2D, g.image(x), w, b, *rest).check(wanted, (F32,))
    integers_agree(O.GROUPED_CONV_2D, dice, g.image(x), w, b, rest, 0, wanted)


@drawn
def test_depthwise_conv_2d(dice: Dice) -> None:
    g, ci, multiplier = Window(dice, dilated=True), dice.upto(4), dice.upto(3)
    x = dice.reals(dice.upto(2), *g.size, ci)
    w, b = dice.reals(1, g.h, g.w, ci * multiplier), dice.reals(ci * multiplier)

    def wanted(x: Array, w: Array, b: Array) -> Array:
        filters = w[0].transpose(2, 0, 1)[:, None]
        return g.result(by_onnx("Conv", g.in_nchw(x), filters, b, group=ci, dilations=list(g.dilation), **g.onnx))

    rest = [*g.padding, multiplier, g.act, *g.options]
    Case(O.DEPTHWISE_CONV_2D, g.image(x), w, b, *rest).check(wanted, (F32,))
    integers_agree(O.DEPTHWISE_CONV_2D, dice, g.image(x), w, b, rest, 3, wanted)


@drawn
def test_transpose_conv_2d(dice: Dice) -> None:
    g, ci, co = Window(dice), dice.upto(3), dice.upto(3)
    filters, size = (g.h, g.w), g.size
    whole = [(n - 1) * s + f for n, s, f in zip(size, g.stride, filters, strict=True)]
    x, w, b = dice.reals(dice.upto(2), *size, ci), dice.reals(co, g.h, g.w, ci), dice.reals(co)
    if g.scheme == 0:
        out = [n - sum(p) for n, p in zip(whole, g.pads, strict=True)]
        middle = g.padding
    else:
        # A forward convolution with the scheme takes these outputs to the image.
        more = [dice.upto(s - 1, 0) for s in g.stride]
        if g.scheme == 1:
            out = [n * s - m for n, s, m in zip(size, g.stride, more, strict=True)]
            g.pads = [(max(0, n - o) // 2, 0) for n, o in zip(whole, out, strict=True)]
        else:
            out = [n + m for n, m in zip(whole, more, strict=True)]
        shape = [len(x), co, *out] if g.nchw else [len(x), *out, co]
        middle = [np.array(shape, np.int32), *g.padding]

    def wanted(x: Array, w: Array, b: Array) -> Array:
        full = by_onnx("ConvTranspose", g.in_nchw(x), w.transpose(3, 0, 1, 2), strides=list(g.stride))
        (top, _), (left, _) = g.pads
        room = [top + out[0] - full.shape[2], left + out[1] - full.shape[3]]
        full = np.pad(full, [(0, 0), (0, 0), (0, max(0, room[0])), (0, max(0, room[1]))])
        return g.result(full[:, :, top : top + out[0], left : left + out[1]] + b[:, None, None])

    rest = [*middle, g.act, g.nchw]
    Case(O.TRANSPOSE_CONV_2D, g.image(x), w, b, *rest).check(wanted, (F32,))
    integers_agree(O.TRANSPOSE_CONV_2D, dice, g.image(x), w, b, rest, 0, wanted)


@drawn
def test_pools(dice: Dice) -> None:
    operation = dice.one([O.AVERAGE_POOL_2D, O.MAX_POOL_2D, O.L2_POOL_2D])
    g = Window(dice, pool=True)
    x = dice.reals(dice.upto(2), *g.size, dice.upto(4))

    def wanted(x: Array) -> Array:
        data = g.in_nchw(np.square(x) if operation is O.L2_POOL_2D else x)
        if operation is O.MAX_POOL_2D:
            return g.result(by_onnx("MaxPool", data, kernel_shape=[g.h, g.w], **g.onnx))
        mean = by_onnx("AveragePool", data, kernel_shape=[g.h, g.w], count_include_pad=0, **g.onnx)
        return g.result(np.sqrt(np.maximum(mean, 0)) if operation is O.L2_POOL_2D else mean)

    kinds = FLOATS if operation is O.L2_POOL_2D else REALS
    rest = [*g.padding, g.w, g.h, g.act, *g.options]
    Case(operation, g.image(x), *rest).check(wanted, (dice.one(kinds),))


@drawn
def test_fully_connected(dice: Dice) -> None:
    rank, units, act = dice.upto(4, 2), dice.upto(6), dice.upto(3, 0)
    shape = dice.sizes(rank, 4)
    x = dice.reals(*shape)
    inputs = shape[-1] * dice.one([1, *shape[-2:-1]])
    w, b = dice.reals(units, inputs), dice.reals(units)

    def wanted(x: Array, w: Array, b: Array) -> Array:
        return LIMITS[act](by_onnx("Gemm", x.reshape(-1, inputs), w, b, transB=1))

    Case(O.FULLY_CONNECTED, x, w, b, act).check(wanted, (dice.one([F32, F16]),))
    integers_agree(O.FULLY_CONNECTED, dice, x, w, b, [act], 0, wanted)
