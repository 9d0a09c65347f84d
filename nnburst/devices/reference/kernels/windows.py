"""Sliding windows over padded images."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ....model.types import Array
from ....model.window import WindowGeometry
from ..call import KernelCall


def as_nhwc(array: Array, nchw: bool) -> Array:
    return array.transpose(0, 2, 3, 1) if nchw else array


def pad_image(call: KernelCall, image: Array, g: WindowGeometry, filler: Any = 0) -> Array:
    """Return an image in NHWC. If it needs padding, append a step that makes a copy with `filler` around the image."""
    h, w = g.height, g.width
    if h.is_plain and w.is_plain:
        return image
    whole = call.scratch((g.batch, h.head + h.size + h.tail, w.head + w.size + w.tail, g.channels), image.dtype)
    whole.fill(filler)
    call.do(np.copyto, whole[:, h.head : h.head + h.size, w.head : w.head + w.size], image)
    return whole


def windows(padded: Array, g: WindowGeometry) -> Array:
    """Return a read-only view [batch, out h, out w, filter h, filter w, channels] of a padded image.

    The last window ends inside the padded image: out = (size + padding - extent) // stride + 1 for each axis.
    """
    h, w = g.height, g.width
    batch, down, right, depth = padded.strides
    return as_strided(
        padded,
        (g.batch, h.out, w.out, h.filter, w.filter, padded.shape[3]),
        (batch, down * h.stride, right * w.stride, down * h.dilation, right * w.dilation, depth),
        writeable=False,
    )
