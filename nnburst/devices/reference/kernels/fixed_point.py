"""Fixed-point arithmetic of LSTM cells with 16-bit gates.

A gate has 3 binary digits before the point and 12 after the point. A result of sigmoid or tanh has 15 digits after the
point. If a gate differs by 1 in the last digit, the cell's state can differ by 8. So each rounding is the same as in
16-bit vector instructions. This gives the same states as on other devices. Arrays are int64.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from ....model.types import Array

_ONE = 2**15 - 1
"""The int16 number nearest to 1, with 15 binary digits after the point."""


def to_16_bits(values: Array) -> Array:
    return np.clip(values, -(2**15), 2**15 - 1)


def divide(values: Array, digits: int) -> Array:
    """Divide by 2^digits, rounding halves away from zero. If `digits` is negative, this is a multiplication."""
    if digits <= 0:
        return values << -digits
    half = 1 << (digits - 1)
    return np.where(values >= 0, (values + half) >> digits, -((half - values) >> digits))


def multiply(values: Array, factor: float) -> Array:
    """Multiply 32-bit integers by the factor's 31-bit fraction, then by its power of 2, rounding twice."""
    fraction, exponent = math.frexp(factor)
    return _multiply(values, round(fraction * 2**31), exponent)


def _multiply(values: Array, multiplier: Any, exponent: int) -> Array:
    product = (values << max(exponent, 0)) * multiplier
    return divide((product + (1 << 30)) >> 31, max(-exponent, 0))


def normalise(gates: Array, weights: Array, bias: Array, scale: float) -> Array:
    """Normalise each row to mean 0 and variance 1, multiply by weights, and add a bias.

    Args:
        gates: int16 [rows, units], of any scale.
        weights: int16 [units], in units of `scale`.
        bias: int32 [units], in units of `scale` / 1024.
        scale: Scale of the weights.

    Returns:
        Gates with 12 binary digits after the point.
    """
    count = gates.shape[1]
    sums, squares = gates.sum(1), np.square(gates).sum(1)
    means = np.sign(sums) * (np.abs(sums) * 1024 // count)
    variances = np.maximum((squares * (2**20 // count) - np.square(means)) >> 20, 0)
    rows = [
        _multiply(1024 * row - mean, *_inverse_root(int(variance) or max(1, int(10_000 * scale))))
        for row, mean, variance in zip(gates, means, variances, strict=True)
    ]
    product = np.stack(rows) * weights + bias
    return to_16_bits(multiply(np.sign(product) * ((np.abs(product) + 512) >> 10), scale * 2**12))


def _inverse_root(variance: int) -> tuple[int, int]:
    """Return 1 / sqrt(variance) as (multiplier, exponent), rounded as in NNAPI."""
    if variance == 1:
        return 2**31 - 1, 0
    shift = 12 - (31 - variance.bit_length()) // 2
    multiplier = round(math.ldexp(1 / math.sqrt(variance), 31 + shift))
    return multiplier << max(-shift, 0), -max(shift, 0)


def times(a: Any, b: Any) -> Array:
    """Return a x b / 2^15, rounding halves up."""
    return np.asarray((a * b + (1 << 14)) >> 15)


def _constant(real: float, digits: int = 15) -> int:
    return math.floor(math.ldexp(real, digits) + 0.5)


def _exp_near_zero(a: Array) -> Array:
    """Return exp(a) for -1/4 <= a < 0, from four terms of the series around -1/8."""
    x, around = a + _constant(1 / 8), _constant(math.exp(-1 / 8))
    square = times(x, x)
    third_and_fourth = times(divide(times(square, square), 2) + times(square, x), _constant(1 / 3))
    return np.asarray(np.minimum(around + times(around, x + divide(third_and_fourth + square, 1)), _ONE))


def _exp(a: Array, whole: int) -> Array:
    """Return exp(a) as a product of powers of e. `a` is at most 0, and has `whole` binary digits before the point."""
    after = 15 - whole
    quarter = 1 << (after - 2)
    near = (a & (quarter - 1)) - quarter
    result, rest = _exp_near_zero(near << whole), near - a
    for power in range(-2, min(whole, 5)):
        factor = _constant(math.exp(-(2.0**power)))
        result = np.where(rest & (1 << (after + power)), times(result, factor), result)
    return np.where(a == 0, _ONE, np.where(a < -(32 << after), 0, result))


def _inverse(x: Array) -> Array:
    """Return 2 / (1 + x) for 0 <= x <= 1, by three Newton steps. The result has 13 binary digits after the point."""
    half = (x + _ONE + 1) >> 1
    result = _constant(48 / 17, 13) + times(half, _constant(-32 / 17, 13))
    for _ in range(3):
        result = result + (times(result, (1 << 13) - times(half, result)) << 2)
    return np.asarray(result)


@cache
def _table(name: str, whole: int) -> Array:
    """Return a function's result for each 16-bit number with `whole` binary digits before the point."""
    a = np.arange(-(2**15), 2**15)
    if name == "sigmoid":
        above = np.minimum(_inverse(_exp(-np.abs(a), whole)) << 1, _ONE)
        table = np.where(a == 0, 1 << 14, np.where(a > 0, above, _ONE - above))
    else:
        above = np.minimum((_inverse(_exp(-np.abs(a), whole + 1)) - (1 << 13)) << 2, _ONE)
        table = np.sign(a) * above
    table.flags.writeable = False
    return table


def sigmoid(a: Array) -> Array:
    """Return 1 / (1 + exp(-a)). `a` has 3 binary digits before the point. The result has 15 digits after the point."""
    return np.asarray(_table("sigmoid", 3)[a + 2**15])


def tanh(a: Array, whole: int = 3) -> Array:
    """Return tanh(a) with 15 binary digits after the point. The 16-bit `a` has `whole` digits before the point."""
    return np.asarray(_table("tanh", whole)[a + 2**15])
