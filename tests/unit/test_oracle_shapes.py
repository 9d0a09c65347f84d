"""Operations that move elements, with shapes and axes at random, against ONNX Runtime."""

from __future__ import annotations

import numpy as np

from support.operations import F32, FLOATS, I32, REALS, Array, Case, Fx, O, Typed
from support.oracles import Dice, by_onnx, drawn, to_nchw, to_nhwc


def ints(*numbers: int) -> Array:
    return np.array(numbers, np.int64)


@drawn
def test_transpose_concatenation_split(dice: Dice) -> None:
    shape = dice.sizes(dice.upto(4))
    rank, axis = len(shape), dice.upto(len(shape) - 1, 0)
    sign = axis - rank if dice.truth() else axis
    perm = dice.rng.permutation(rank)
    kind = dice.one(REALS)
    Case(O.TRANSPOSE, dice.reals(*shape), perm.astype(np.int32)).check(
        lambda x: by_onnx("Transpose", x, perm=perm.tolist()), (kind,)
    )
    parts = [dice.reals(*shape[:axis], dice.upto(4), *shape[axis + 1 :]) for _ in range(dice.upto(4))]
    Case(O.CONCATENATION, *parts, sign).check(lambda *xs: by_onnx("Concat", *xs, axis=axis), (kind,))
    count = dice.upto(3)
    whole = dice.reals(*shape[:axis], shape[axis] * count, *shape[axis + 1 :])

    def wanted(x: Array) -> list[Array]:
        found = by_onnx("Split", x, axis=axis, num_outputs=count, outputs=count)
        return [found] if count == 1 else found

    Case(O.SPLIT, whole, sign, count).check(wanted, (kind,), count=count)


@drawn
def test_pad_tile_gather(dice: Dice) -> None:
    shape, kind = dice.sizes(dice.upto(4)), dice.one(REALS)
    rank, axis = len(shape), dice.upto(len(shape) - 1, 0)
    x = dice.reals(*shape)
    pads = np.array([[dice.upto(3, 0), dice.upto(3, 0)] for _ in range(rank)], np.int32)
    sides = ints(*pads[:, 0], *pads[:, 1])
    Case(O.PAD, x, pads).check(lambda x: by_onnx("Pad", x, sides), (kind,))
    Case(O.PAD_V2, x, pads, Fx(1.5)).check(lambda x, v: by_onnx("Pad", x, sides, np.float32(v)), (dice.one(FLOATS),))
    multiples = np.array(dice.sizes(rank, 3), np.int32)
    Case(O.TILE, x, multiples).check(lambda x: by_onnx("Tile", x, multiples.astype(np.int64)), (kind,))
    indices = dice.rng.integers(0, shape[axis], dice.sizes(dice.upto(2), 4)).astype(np.int32)
    Case(O.GATHER, x, axis - rank, indices).check(lambda x: by_onnx("Gather", x, indices, axis=axis), (kind,))


@drawn
def test_slice_and_strided_slice(dice: Dice) -> None:
    shape, kind = dice.sizes(dice.upto(4), 6), dice.one(REALS)
    rank, x = len(shape), dice.reals(*shape)
    begin = [dice.upto(n - 1, 0) for n in shape]
    size = [dice.upto(n - b) for n, b in zip(shape, begin, strict=True)]
    told = [-1 if b + s == n and dice.truth() else s for b, s, n in zip(begin, size, shape, strict=True)]
    ends = np.add(begin, size)
    Case(O.SLICE, x, np.int32(begin), np.int32(told)).check(
        lambda x: by_onnx("Slice", x, ints(*begin), ends.astype(np.int64)), (kind,)
    )
    for _ in range(4):
        strides = [dice.one([1, 1, 2, 3, -1, -2]) for _ in shape]
        first = [dice.upto(n - 1, -n) for n in shape]  # beyond the borders ONNX moves it inside, NNAPI takes nothing
        last = [dice.upto(n + 2, -n - 2) for n in shape]
        masks = [dice.upto(2**rank - 1, 0), dice.upto(2**rank - 1, 0)]
        furthest = 2**31
        starts, stops = list(first), list(last)
        for i, stride in enumerate(strides):
            if masks[0] >> i & 1:
                starts[i] = 0 if stride > 0 else furthest
            if masks[1] >> i & 1:
                stops[i] = furthest if stride > 0 else -furthest
        limits = (ints(*starts), ints(*stops), ints(*range(rank)), ints(*strides))
        want = by_onnx("Slice", x, *limits)
        if want.size == 0:
            continue
        dropped = [i for i in range(rank) if want.shape[i] == 1 and strides[i] > 0 and dice.truth()]

        def wanted(x: Array, dropped: list[int] = dropped, limits: tuple[Array, ...] = limits) -> Array:
            y = by_onnx("Slice", x, *limits)
            return y.reshape([n for i, n in enumerate(y.shape) if i not in dropped] or [1])

        shrink = sum(1 << i for i in dropped)
        numbers = [np.array(part, np.int32) for part in (first, last, strides)]
        Case(O.STRIDED_SLICE, x, *numbers, *masks, shrink).check(wanted, (kind,))


@drawn
def test_reshape_squeeze_expand_shuffle(dice: Dice) -> None:
    shape, kind = [dice.one([1, 1, 2, 3]) for _ in range(dice.upto(4))], dice.one(REALS)
    rank, x = len(shape), dice.reals(*shape)
    ones = [i for i, n in enumerate(shape) if n == 1 and dice.truth()]
    if len(ones) < rank:
        told = [i - rank if dice.truth() else i for i in ones]
        if ones:
            Case(O.SQUEEZE, x, np.int32(told)).check(lambda x: by_onnx("Squeeze", x, ints(*ones)), (kind,))
    axis = dice.upto(rank, 0)
    Case(O.EXPAND_DIMS, x, axis - rank - 1).check(lambda x: by_onnx("Unsqueeze", x, ints(axis)), (kind,))
    target = list(dice.rng.permutation(shape))
    free = dice.upto(rank - 1, 0)
    told = [-1 if i == free else int(n) for i, n in enumerate(target)]
    Case(O.RESHAPE, x, np.int32(told)).check(lambda x: by_onnx("Reshape", x, ints(*told)), (kind,))
    groups, at = dice.upto(3), dice.upto(rank - 1, 0)
    wide = dice.reals(*shape[:at], groups * shape[at], *shape[at + 1 :])

    def shuffled(x: Array) -> Array:
        y = np.empty_like(x)
        for g in range(groups):
            for i in range(shape[at]):
                np.moveaxis(y, at, 0)[i * groups + g] = np.moveaxis(x, at, 0)[g * shape[at] + i]
        return y

    Case(O.CHANNEL_SHUFFLE, wide, groups, at - rank).check(shuffled, (kind,))


@drawn
def test_blocks_of_images(dice: Dice) -> None:
    kind, nchw, block = dice.one(REALS), dice.truth(), dice.upto(3)
    b, h, w, c = dice.sizes(4, 3)
    options = [True] if nchw else [False] if dice.truth() else []

    def laid(x: Array) -> Array:
        return to_nchw(x) if nchw else x

    def through(operator: str, **attributes: object) -> object:
        def run(x: Array) -> Array:
            y = by_onnx(operator, x if nchw else to_nchw(x), **attributes)
            return y if nchw else to_nhwc(y)

        return run

    x = laid(dice.reals(b, h, w, c * block * block))
    Case(O.DEPTH_TO_SPACE, x, block, *options).check(through("DepthToSpace", blocksize=block, mode="DCR"), (kind,))
    x = laid(dice.reals(b, h * block, w * block, c))
    Case(O.SPACE_TO_DEPTH, x, block, *options).check(through("SpaceToDepth", blocksize=block), (kind,))
    down, right = dice.upto(3), dice.upto(3)
    pads = [(dice.upto(2, 0), 0), (dice.upto(2, 0), 0)]
    pads = [(p, -(n + p) % k) for n, (p, _), k in zip((h, w), pads, (down, right), strict=True)]

    def spread(x: Array) -> Array:
        image = np.pad(to_nhwc(x) if nchw else x, [(0, 0), *pads, (0, 0)])
        parts = [image[:, i::down, j::right] for i in range(down) for j in range(right)]
        return laid(np.concatenate(parts))

    def gathered(x: Array) -> Array:
        parts = to_nhwc(x) if nchw else x
        count = len(parts) // (down * right)
        image = np.zeros((count, parts.shape[1] * down, parts.shape[2] * right, parts.shape[3]))
        for i in range(down):
            for j in range(right):
                at = (i * right + j) * count
                image[:, i::down, j::right] = parts[at : at + count]
        return laid(image)

    x = laid(dice.reals(b, h, w, c))
    tail = (np.int32([down, right]), np.int32(pads), *options)
    Case(O.SPACE_TO_BATCH_ND, x, *tail).check(spread, (kind,))
    x = laid(dice.reals(b * down * right, h, w, c))
    Case(O.BATCH_TO_SPACE_ND, x, np.int32([down, right]), *options).check(gathered, (kind,))


@drawn
def test_resize(dice: Dice) -> None:
    kind, nchw = dice.one(REALS), dice.truth()
    size, out = dice.sizes(2, 7), dice.sizes(2, 9)
    x = dice.reals(dice.upto(2), *size, dice.upto(3))
    align, half = dice.one([(False, False), (True, False), (False, True)])
    mode = "align_corners" if align else "half_pixel" if half else "asymmetric"
    sizes = ints(len(x), x.shape[3], *out)

    def wanted(x: Array) -> Array:
        image = x if nchw else to_nchw(x)
        y = by_onnx("Resize", image, None, None, sizes, coordinate_transformation_mode=mode, mode="linear")
        return y if nchw else to_nhwc(y)

    options = [nchw, align, half] if align or half else [nchw] if nchw else []
    Case(O.RESIZE_BILINEAR, to_nchw(x) if nchw else x, out[1], out[0], *options).check(wanted, (kind,))

    def place(i: int, n: int, m: int) -> int:
        """With fractions, so that halves are halves."""
        if align:
            return min(int((2 * i * (n - 1) + (m - 1)) // (2 * (m - 1))) if m > 1 else 0, n - 1)
        return min((2 * i + 1) * n // (2 * m) if half else i * n // m, n - 1)

    def nearest(x: Array) -> Array:
        image = to_nhwc(x) if nchw else x
        rows = [place(i, size[0], out[0]) for i in range(out[0])]
        columns = [place(j, size[1], out[1]) for j in range(out[1])]
        y = image[:, rows][:, :, columns]
        return to_nchw(y) if nchw else y

    options = [nchw, align, half] if align or half else [nchw]
    Case(O.RESIZE_NEAREST_NEIGHBOR, to_nchw(x) if nchw else x, out[1], out[0], *options).check(nearest, (kind,))


@drawn
def test_reductions(dice: Dice) -> None:
    shape = dice.sizes(dice.upto(4))
    rank, x = len(shape), dice.reals(*shape)
    drawn_axes = dice.rng.integers(0, rank, dice.upto(rank)).tolist()  # some of them twice
    axes, told = sorted(set(drawn_axes)), np.int32([i - rank if dice.truth() else i for i in drawn_axes])
    keep = dice.truth()
    names = {O.MEAN: "ReduceMean", O.REDUCE_MAX: "ReduceMax", O.REDUCE_MIN: "ReduceMin", O.REDUCE_SUM: "ReduceSum"}
    names[O.REDUCE_PROD] = "ReduceProd"
    for operation, name in names.items():
        kind = dice.one(FLOATS if operation in (O.REDUCE_SUM, O.REDUCE_PROD) else REALS)

        def wanted(x: Array, name: str = name) -> Array:
            y = by_onnx(name, x, ints(*axes), keepdims=int(keep))
            return y.reshape(y.shape or (1,))

        Case(operation, x, told, int(keep) if operation is O.MEAN else keep).check(wanted, (kind,))


@drawn
def test_arguments_and_topk(dice: Dice) -> None:
    shape = dice.sizes(dice.upto(4))
    rank, axis = len(shape), dice.upto(len(shape) - 1, 0)
    x = dice.rng.integers(-3, 4, shape).astype(np.float64)
    name = dice.one(["ArgMax", "ArgMin"])
    operation = O.ARGMAX if name == "ArgMax" else O.ARGMIN

    def wanted(x: Array) -> Array:
        y = by_onnx(name, x, axis=axis, keepdims=0)
        return y.reshape(y.shape or (1,))

    Case(operation, x, axis - rank).check(wanted, (F32,))
    Case(operation, Typed(x, I32), axis).check(wanted, (I32,))
    k = dice.upto(shape[-1])
    distinct = dice.rng.permutation(int(np.prod(shape))).reshape(shape).astype(np.float64)
    Case(O.TOPK_V2, distinct, k).check(lambda x: by_onnx("TopK", x, ints(k), outputs=2), (F32,), count=2)
