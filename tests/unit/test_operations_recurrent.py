"""LSTM with all its options and SVDF against loops over units; test_oracle_recurrent.py has the other cells."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from nnburst.devices.reference.kernels import fixed_point
from support.operations import F32, FLOATS, Array, Case, Fx, O, rng


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def tensors(seed: int, **shapes: tuple[int, ...] | None) -> dict[str, Any]:
    draw = rng(seed)
    return {name: None if shape is None else draw.normal(size=shape) * 0.7 for name, shape in shapes.items()}


BATCH, STEPS, INPUTS, UNITS, OUTS = 2, 3, 3, 4, 2


@pytest.mark.parametrize("rank", [1, 2])
def test_svdf_pushes_its_newest_result(rank: int) -> None:
    filters, memory = UNITS * rank, 3
    p = tensors(
        2, x=(BATCH, INPUTS), wf=(filters, INPUTS), wt=(filters, memory), b=(UNITS,), prev=(BATCH, memory * filters)
    )
    p["prev"].reshape(BATCH, filters, memory)[:, :, -1] = 0  # the place of the newest is free

    def wanted(x: Array, wf: Array, wt: Array, b: Array, prev: Array) -> tuple[Array, Array]:
        state = np.zeros((BATCH, filters, memory))
        out = np.tile(b, (BATCH, 1))
        for n, f in itertools.product(range(BATCH), range(filters)):
            seen = [*prev.reshape(BATCH, filters, memory)[n, f, :-1], float(x[n] @ wf[f])]
            out[n, f // rank] += sum(s * w for s, w in zip(seen, wt[f], strict=True))
            state[n, f] = [*seen[1:], 0]
        return state.reshape(BATCH, -1), out

    Case(O.SVDF, *p.values(), rank, 0).check(wanted, FLOATS)


def lstm_inputs(seed: int, *, cifg: bool, peephole: bool, projection: bool, norm: bool) -> dict[str, Any]:
    o = OUTS if projection else UNITS
    entering = None if cifg else True

    def gates(prefix: str, shape: tuple[int, ...], first: Any = entering) -> dict[str, Any]:
        return {f"{prefix}{g}": shape if g != "i" or first else None for g in "ifco"}

    shapes: dict[str, Any] = {**gates("w", (UNITS, INPUTS)), **gates("r", (UNITS, o))}
    shapes |= {f"p{g}": (UNITS,) if peephole and (g != "i" or not cifg) else None for g in "ifo"}
    shapes |= gates("b", (UNITS,))
    shapes |= {"proj": (o, UNITS) if projection else None, "projb": (o,) if projection else None}
    shapes |= {"out": (BATCH, o), "cell": (BATCH, UNITS)}
    shapes |= {f"n{g}": (UNITS,) if norm and (g != "i" or not cifg) else None for g in "ifco"}
    return tensors(seed, **shapes)


def lstm_step(
    p: dict[str, Array], x: Array, out: Array, cell: Array, clips: tuple[float, float]
) -> tuple[Array, Array]:
    """One sample at a time, one unit at a time."""
    new_out, new_cell = [], []
    for n in range(len(x)):

        def gate(g: str, seen: Array | None, n: int = n) -> list[float]:
            z = [float(p["w" + g][u] @ x[n] + p["r" + g][u] @ out[n]) for u in range(UNITS)]
            if seen is not None and "p" + g in p:
                z = [v + seen[u] * p["p" + g][u] for u, v in enumerate(z)]
            if "n" + g in p:
                mean = sum(z) / UNITS
                deviation = math.sqrt(sum((v - mean) ** 2 for v in z) / UNITS)
                z = [(v - mean) / deviation * p["n" + g][u] for u, v in enumerate(z)]
            return [v + p["b" + g][u] for u, v in enumerate(z)]

        f = [sigmoid(v) for v in gate("f", cell[n])]
        i = [sigmoid(v) for v in gate("i", cell[n])] if "wi" in p else [1 - v for v in f]
        c = [f[u] * cell[n][u] + i[u] * math.tanh(v) for u, v in enumerate(gate("c", None))]
        c = [min(max(v, -clips[0]), clips[0]) for v in c] if clips[0] else c
        h = np.array([sigmoid(v) * math.tanh(c[u]) for u, v in enumerate(gate("o", np.array(c)))])
        if "proj" in p:
            h = p["proj"] @ h + p["projb"]
            h = np.clip(h, -clips[1], clips[1]) if clips[1] else h
        new_out.append(h)
        new_cell.append(c)
    return np.array(new_out), np.array(new_cell)


VARIANTS = list(itertools.product([False, True], repeat=4))


@pytest.mark.parametrize(("cifg", "peephole", "projection", "norm"), VARIANTS)
def test_lstm(cifg: bool, peephole: bool, projection: bool, norm: bool) -> None:
    p = lstm_inputs(3, cifg=cifg, peephole=peephole, projection=projection, norm=norm)
    x, clips = rng(4).normal(size=(BATCH, INPUTS)), (0.5, 0.3)
    states = [p[n] for n in ("out", "cell")]
    weights = [v for n, v in p.items() if n not in ("out", "cell") and n[0] != "n"]
    norms = [p[f"n{g}"] for g in "ifco"]
    names = ["x", *(n for n in p if p[n] is not None and n[0] != "n" and n not in ("out", "cell")), "out", "cell"]
    names += [f"n{g}" for g in "ifco" if p[f"n{g}"] is not None]

    def named(*reals: Any) -> tuple[dict[str, Array], list[float]]:
        arrays = [r for r in reals if isinstance(r, np.ndarray)]
        return dict(zip(names, arrays, strict=True)), [r for r in reals if not isinstance(r, np.ndarray)]

    def wanted(*reals: Any) -> tuple[Array, ...]:
        given, limits = named(*reals)
        out, cell = lstm_step(given, given["x"], given["out"], given["cell"], (limits[0], limits[1]))
        scratch = np.zeros((BATCH, UNITS * (3 if cifg else 4)))
        return scratch, out, cell, out

    tail = norms if norm else []
    Case(O.LSTM, x, *weights, *states, 4, *map(Fx, clips), *tail).check(wanted, FLOATS)

    sequence = rng(5).normal(size=(STEPS, BATCH, INPUTS))

    def wanted_sequence(*reals: Any, major: bool) -> tuple[Array, ...]:
        given, limits = named(*reals)
        out, cell, outs = given["out"], given["cell"], []
        xs = given["x"] if major else given["x"].swapaxes(0, 1)
        for step in xs:
            out, cell = lstm_step(given, step, out, cell, (limits[0], limits[1]))
            outs.append(out)
        found = np.array(outs)
        return (found if major else found.swapaxes(0, 1)), out, cell

    for major in (True, False):
        data = sequence if major else sequence.swapaxes(0, 1).copy()
        case = Case(O.UNIDIRECTIONAL_SEQUENCE_LSTM, data, *weights, *states, 4, *map(Fx, clips), major, *norms)
        case.check(lambda *r, m=major: wanted_sequence(*r, major=m), (F32,), count=3)
        case.check(lambda *r, m=major: wanted_sequence(*r, major=m)[:1], (F32,))


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("aux", ["linked", "instead"])
def test_both_ways_lstm_is_two_of_one_way(merge: bool, aux: str) -> None:
    ways = [lstm_inputs(seed, cifg=False, peephole=True, projection=False, norm=False) for seed in (6, 7)]
    x = rng(8).normal(size=(STEPS, BATCH, INPUTS))
    second = rng(9).normal(size=(STEPS, BATCH, INPUTS))
    more = [
        [rng(10 + w).normal(size=(UNITS, INPUTS)) * 0.5 if aux == "linked" else None for _ in "ifco"] for w in (0, 1)
    ]
    weights = [[v for n, v in p.items() if n not in ("out", "cell") and n[0] != "n"] for p in ways]
    states = [p[n] for p in ways for n in ("out", "cell")]
    tail = [4, Fx(0.0), Fx(0.0), merge, True, *[None] * 8]
    case = Case(O.BIDIRECTIONAL_SEQUENCE_LSTM, x, *weights[0], *weights[1], *states, second, *more[0], *more[1], *tail)

    def one_way(way: int) -> Array:
        p = {n: np.float32(v).astype(np.float64) for n, v in ways[way].items() if v is not None}
        data, extra = x, second if aux == "linked" else None
        if aux == "instead" and way == 1:
            data = second
        if extra is not None:
            data = np.concatenate([data, extra], -1)
            for g, w in zip("ifco", more[way], strict=True):
                p[f"w{g}"] = np.concatenate([p[f"w{g}"], w], 1)
        out, cell, outs = p["out"], p["cell"], []
        for step in data[::-1] if way else data:
            out, cell = lstm_step(p, step, out, cell, (0, 0))
            outs.append(out)
        return np.array(outs[::-1] if way else outs)

    both = [one_way(0), one_way(1)]
    wanted = [np.concatenate(both, -1)] if merge else both
    case.check(lambda *r: wanted, (F32,), count=len(wanted))
    outputs, _, _ = case.run(F32, count=len(wanted) + 4)
    np.testing.assert_allclose(outputs[-4], both[0][-1], atol=1e-5)
    np.testing.assert_allclose(outputs[-2], both[1][0], atol=1e-5)


def test_fixed_point_functions_follow_the_real_ones() -> None:
    """Three steps of Newton's method in 16 bits leave less than 13 of 32768 steps."""
    a = np.arange(-(2**15), 2**15)
    found = fixed_point.sigmoid(a)
    assert np.abs(found - 2**15 / (1 + np.exp(-a / 2**12))).max() < 13
    assert (np.diff(found) >= -13).all()
    for whole in range(7):
        found = fixed_point.tanh(a, whole)
        assert np.abs(found - 2**15 * np.tanh(a / 2.0 ** (15 - whole))).max() < 13
        np.testing.assert_array_equal(found[1:], -found[1:][::-1])


@pytest.mark.parametrize("factor", [3.7, 0.25, 1e-3, 2.0**-20])
def test_fixed_point_factors_round_twice(factor: float) -> None:
    values = rng(19).integers(-(2**20), 2**20, 5000)
    assert (
        np.abs(fixed_point.multiply(values, factor) - values * factor).max() <= 0.75
    )  # a half may become one, and that a half again
    assert fixed_point.divide(np.array([-3, -1, 1, 3, 5]), 1).tolist() == [-2, -1, 1, 2, 3]


def test_fixed_point_normalisation_follows_the_real_one() -> None:
    draw = rng(20)
    z, weights, bias = draw.integers(-8000, 8000, (3, 8)), draw.integers(1, 2**15, 8), draw.integers(-(2**20), 2**20, 8)
    real = (z - z.mean(1, keepdims=True)) / z.std(1, keepdims=True) * weights / 2**15 + bias / 2**25
    found = fixed_point.normalise(z, weights, bias, 2.0**-15)
    assert np.abs(found - real * 2**12).max() <= 8
    assert not fixed_point.normalise(np.full((1, 8), 77), weights, 0 * bias, 2.0**-15).any()
