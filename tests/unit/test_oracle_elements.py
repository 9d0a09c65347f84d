"""Functions of numbers, broadcasting and normalisations at random, against Python's math and ONNX Runtime."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from support.operations import B8, F16, F32, FLOATS, I32, QUANTS, REALS, Array, Case, Fx, O, Typed
from support.oracles import Dice, by_onnx, drawn, to_nchw, to_nhwc

ONE: dict[O, tuple[Callable[[float], float], float, float, Any]] = {
    O.ABS: (abs, -9, 9, FLOATS),
    O.EXP: (math.exp, -5, 2, FLOATS),
    O.FLOOR: (math.floor, -9, 9, (F32,)),
    O.HARD_SWISH: (lambda x: x * min(max(x + 3, 0), 6) / 6, -5, 5, REALS),
    O.LOG: (math.log, 0.01, 9, FLOATS),
    O.LOGISTIC: (lambda x: 1 / (1 + math.exp(-x)), -9, 9, REALS),
    O.NEG: (lambda x: -x, -9, 9, FLOATS),
    O.RELU: (lambda x: max(x, 0), -9, 9, REALS),
    O.RELU1: (lambda x: min(max(x, -1), 1), -3, 3, REALS),
    O.RELU6: (lambda x: min(max(x, 0), 6), -9, 9, REALS),
    O.RSQRT: (lambda x: 1 / math.sqrt(x), 0.05, 9, FLOATS),
    O.SIN: (math.sin, -9, 9, FLOATS),
    O.SQRT: (math.sqrt, 0, 9, FLOATS),
    O.TANH: (math.tanh, -4, 4, REALS),
}
TWO: dict[O, tuple[Callable[[float, float], float], Any]] = {
    O.ADD: (lambda a, b: a + b, REALS),
    O.DIV: (lambda a, b: a / b, FLOATS),
    O.MAXIMUM: (max, REALS),
    O.MINIMUM: (min, REALS),
    O.MUL: (lambda a, b: a * b, REALS),
    O.POW: (math.pow, FLOATS),
    O.PRELU: (lambda a, b: a if a >= 0 else a * b, REALS),
    O.SUB: (lambda a, b: a - b, REALS),
}
COMPARED: dict[O, Callable[[Any, Any], bool]] = {
    O.EQUAL: lambda a, b: bool(a == b),
    O.GREATER: lambda a, b: bool(a > b),
    O.GREATER_EQUAL: lambda a, b: bool(a >= b),
    O.LESS: lambda a, b: bool(a < b),
    O.LESS_EQUAL: lambda a, b: bool(a <= b),
    O.NOT_EQUAL: lambda a, b: bool(a != b),
}
FUSED = (O.ADD, O.DIV, O.MUL, O.SUB)
LIMITS = [(-math.inf, math.inf), (0, math.inf), (-1, 1), (0, 6)]


def broadcast_shapes(dice: Dice) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes that fit each other, either of which may be short or have sizes of 1."""
    whole = dice.sizes(dice.upto(4), 4)
    shapes = [tuple(1 if dice.upto(4) == 1 else n for n in whole)[dice.upto(len(whole) - 1, 0) :] for _ in "ab"]
    return shapes[0], shapes[1]


@drawn
def test_functions_of_one_number(dice: Dice) -> None:
    for operation, (function, low, high, kinds) in ONE.items():
        x = dice.reals(*dice.sizes(dice.upto(4), 4), low=low, high=high)
        Case(operation, x).check(np.vectorize(function, [float]), (dice.one(kinds),))
    alpha, kind = dice.upto(40) / 16, dice.one(FLOATS)
    Case(O.ELU, dice.reals(3, 4), Fx(alpha)).check(
        np.vectorize(lambda x, alpha: x if x >= 0 else alpha * math.expm1(x), [float]), (kind,)
    )


@drawn
def test_functions_of_two_numbers_broadcast(dice: Dice) -> None:
    for operation, (function, kinds) in TWO.items():
        low, high = (0.5, 2.0) if operation in (O.POW, O.DIV) else (-3.0, 3.0)
        a, b = (dice.reals(*shape, low=low, high=high) for shape in broadcast_shapes(dice))
        act = dice.upto(3, 0) if operation in FUSED else 0
        least, most = LIMITS[act]
        vector = np.vectorize(function, [float])
        options: dict[str, Any] = {}
        kind = dice.one(kinds)
        if operation is O.MUL and kind in QUANTS:
            options["quantisations"] = [(0.08, 128 if kind == QUANTS[0] else 0)]
        case = Case(operation, a, b, *([act] if operation in FUSED else []))
        case.check(lambda a, b, f=vector, lo=least, hi=most: np.clip(f(a, b), lo, hi), (kind,), **options)


@drawn
def test_integers_and_comparisons(dice: Dice) -> None:
    a, b = (dice.rng.integers(-4, 5, shape) for shape in broadcast_shapes(dice))
    exact: dict[O, Callable[[int, int], Any]] = {
        O.ADD: lambda a, b: a + b,
        O.SUB: lambda a, b: a - b,
        O.MUL: lambda a, b: a * b,
        O.MAXIMUM: max,
        O.MINIMUM: min,
    }
    for operation, function in exact.items():
        rest = [0] if operation in FUSED else []
        Case(operation, Typed(a, I32), Typed(b, I32), *rest).check(np.vectorize(function, [int]), (I32,))
    Case(O.DIV, Typed(a, I32), Typed(b, I32), 0).check(
        np.vectorize(lambda a, b: math.floor(a / b) if b else 0, [int]), (I32,)
    )
    for operation, compare in COMPARED.items():
        vector = np.vectorize(compare, [bool])
        Case(operation, Typed(a, I32), Typed(b, I32)).check(vector, (I32,))
        Case(operation, a.astype(float), b.astype(float)).check(vector, (dice.one([F32, F16]),))
        Case(operation, a.astype(float), b.astype(float)).check(
            vector, (dice.one(QUANTS),), shared=True, quantisations=[(0.0, 0)]
        )
        truths = [Typed(np.maximum(x, 0), B8) for x in (a, b)]  # every byte but 0 is true
        Case(operation, *truths).check(lambda a, b, v=vector: v(a != 0, b != 0), (B8,))


@drawn
def test_normalisations(dice: Dice) -> None:
    shape = dice.sizes(dice.upto(4))
    rank, axis, x = len(shape), dice.upto(len(shape) - 1, 0), dice.reals(*shape, low=-3, high=3)
    sign, beta = axis - rank if dice.truth() else axis, dice.one([1.0, 0.5, 2.0])
    kind = dice.one(REALS)

    def soft(x: Array, beta: float) -> Array:
        return by_onnx("Softmax", x * beta, axis=axis)

    Case(O.SOFTMAX, x, Fx(beta), sign).check(soft, (kind,))
    Case(O.LOG_SOFTMAX, x, Fx(beta), sign).check(
        lambda x, beta: by_onnx("LogSoftmax", x * beta, axis=axis), (dice.one(FLOATS),)
    )
    Case(O.L2_NORMALIZATION, x, sign).check(lambda x: by_onnx("LpNormalization", x, axis=axis, p=2), (kind,))
    radius, bias, alpha, across = dice.upto(3, 0), 1.0, 0.25, dice.upto(3, 0)
    data = dice.reals(2, 3, 4, dice.upto(6))

    def response(x: Array, bias: float, alpha: float, beta: float) -> Array:
        size = 2 * radius + 1
        y = by_onnx("LRN", np.moveaxis(x, across, 1), size=size, alpha=alpha * size, beta=beta, bias=bias)
        return np.moveaxis(y, 1, across)

    numbers = (Fx(bias), Fx(alpha), Fx(beta), *([] if across == 3 else [across - 4]))
    Case(O.LOCAL_RESPONSE_NORMALIZATION, data, radius, *numbers).check(response, (dice.one(FLOATS),))
    gamma, shift, epsilon = 1.5, -0.25, 1e-3
    nchw, depth = dice.truth(), data.shape[3]

    def instance(x: Array, gamma: float, shift: float, epsilon: float) -> Array:
        image = x if nchw else to_nchw(x)
        y = by_onnx("InstanceNormalization", image, np.full(depth, gamma), np.full(depth, shift), epsilon=epsilon)
        return y if nchw else to_nhwc(y)

    numbers = (Fx(gamma), Fx(shift), Fx(epsilon))
    case = Case(O.INSTANCE_NORMALIZATION, to_nchw(data) if nchw else data, *numbers, nchw)
    case.check(instance, (dice.one(FLOATS),))
