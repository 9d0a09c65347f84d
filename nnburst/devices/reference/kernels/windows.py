"""Images under a sliding window: padded copies and views of all windows."""

from __future__ import annotations

from collections.abc import Iterator

from numpy.lib.stride_tricks import as_strided

from ....model import Array, WindowGeometry


def as_nhwc(array: Array, nchw: bool) -> Array:
    return array.transpose(0, 2, 3, 1) if nchw else array


def padded_shape(g: WindowGeometry) -> tuple[int, int, int, int]:
    h, w = g.height, g.width
    return g.batch, h.head + h.size + h.tail, w.head + w.size + w.tail, g.channels


def inner_part(padded: Array, g: WindowGeometry) -> Array:
    h, w = g.height, g.width
    return padded[:, h.head : h.head + h.size, w.head : w.head + w.size]


def windows(padded: Array, g: WindowGeometry) -> Array:
    """Return a read-only view [batch, out h, out w, filter h, filter w, channels] of a padded image.

    The last window ends inside: out = (size + padding - extent) // stride + 1 for each axis.
    """
    h, w = g.height, g.width
    batch, down, right, depth = padded.strides
    return as_strided(
        padded,
        (g.batch, h.out, w.out, h.filter, w.filter, padded.shape[3]),
        (batch, down * h.stride, right * w.stride, down * h.dilation, right * w.dilation, depth),
        writeable=False,
    )


def taps(padded: Array, g: WindowGeometry) -> Iterator[tuple[int, int, Array]]:
    """Yield (i, j, view [batch, out h, out w, channels]) for each cell of the window."""
    every = windows(padded, g)
    for i in range(g.height.filter):
        for j in range(g.width.filter):
            yield i, j, every[:, :, :, i, j]
