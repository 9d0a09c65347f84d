"""Kernels of normalisations along an axis or over an image, with sums in float64."""

from __future__ import annotations

import numpy as np

from ....model.types import Array
from ..call import KernelCall


def softmax(call: KernelCall) -> None:
    """SOFTMAX: exp(beta (x - max)) / sum, along an axis."""
    axis, beta = call.axis("axis", call.array("x").ndim), call.real_dtype(call.number("beta"))

    def function(x: Array) -> Array:
        powers = np.exp((x - x.max(axis, keepdims=True)) * beta)
        return np.asarray(powers / powers.sum(axis, keepdims=True))

    call.compute(function, call.real("x"))


def log_softmax(call: KernelCall) -> None:
    """LOG_SOFTMAX: beta x - log sum exp(beta x), along an axis."""
    axis, beta = call.axis("axis", call.array("x").ndim), call.number("beta")

    def function(x: Array) -> Array:
        scaled = (x - x.max(axis, keepdims=True)).astype(np.float64) * beta
        return np.asarray(scaled - np.log(np.exp(scaled).sum(axis, keepdims=True)))

    call.compute(function, call.real("x"))


def l2_normalization(call: KernelCall) -> None:
    """L2_NORMALIZATION: x / sqrt(sum of squares), along an axis; zeros stay zeros."""
    axis = call.axis("axis", call.array("x").ndim)

    def function(x: Array) -> Array:
        norm = np.sqrt(np.square(x, dtype=np.float64).sum(axis, keepdims=True))
        return np.asarray(x / np.where(norm == 0, 1, norm))

    call.compute(function, call.real("x"))


def local_response_normalization(call: KernelCall) -> None:
    """LOCAL_RESPONSE_NORMALIZATION: x / (bias + alpha * s)^beta, with s the sum of 2 * radius + 1 squares."""
    size = call.array("x").shape[axis := call.axis("axis", call.array("x").ndim)]
    radius = min(call.integer("radius", least=0), size)
    bias, alpha, beta = (call.number(name) for name in ("bias", "alpha", "beta"))
    first = np.maximum(np.arange(size) - radius, 0)
    last = np.minimum(np.arange(size) + radius + 1, size)

    def function(x: Array) -> Array:
        squares = np.moveaxis(np.square(x, dtype=np.float64), axis, -1)
        summed = np.concatenate([np.zeros((*squares.shape[:-1], 1)), squares.cumsum(-1)], -1)
        window = np.moveaxis(summed[..., last] - summed[..., first], -1, axis)
        return np.asarray(x / (bias + alpha * window) ** beta)

    call.compute(function, call.real("x"))


def instance_normalization(call: KernelCall) -> None:
    """INSTANCE_NORMALIZATION: gamma (x - mean) / sqrt(variance + epsilon) + beta, over height and width."""
    over = (2, 3) if call.integer("nchw") else (1, 2)
    gamma, beta, epsilon = (call.number(name) for name in ("gamma", "beta", "epsilon"))

    def function(x: Array) -> Array:
        centred = x - x.mean(over, np.float64, keepdims=True)
        variance = np.square(centred).mean(over, keepdims=True)
        return np.asarray(gamma * centred / np.sqrt(variance + epsilon) + beta)

    call.compute(function, call.real("x"))
