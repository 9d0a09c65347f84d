"""Run a recurrent network whose state never leaves the service.

A gated recurrent cell follows a noisy signal. Its state is an output of each step and an input of the next:
``Session.bind(state={"h_out": "h_in"})`` keeps it in the device, so that it is never transferred. The program compares
the result with the same cell in NumPy. It also compares the time of a step with the time of a step whose state is
copied in and out.

Usage: python examples/recurrent_state.py [--units 256] [--steps 500]
"""

from __future__ import annotations

import argparse
import time

import numpy as np

import nnburst
from nnburst import OperandType

FEATURES = 4
Weights = dict[str, np.ndarray]


def make_weights(units: int) -> Weights:
    """Return random weights of a minimal gated unit (one gate), small enough that the state stays bounded."""
    rng = np.random.default_rng(1)

    def draw(rows: int, columns: int) -> np.ndarray:
        return (rng.normal(size=(rows, columns)) / np.sqrt(columns)).astype(np.float32)

    return {
        "gate_x": draw(units, FEATURES),
        "gate_h": draw(units, units),
        "new_x": draw(units, FEATURES),
        "new_h": draw(units, units),
        "read_out": draw(1, units),
    }


def build(w: Weights, units: int) -> nnburst.Model:
    """Return a model of one step.

    gate = σ(Wx + Uh), new = tanh(Vx + gate ∘ Zh), h' = h + gate ∘ (new - h), y = r·h'
    """
    b = nnburst.ModelBuilder()
    x = b.input("x", OperandType.TENSOR_FLOAT32, (1, FEATURES))
    h = b.input("h_in", OperandType.TENSOR_FLOAT32, (1, units))
    gate = b.logistic(b.fully_connected(x, w["gate_x"]) + b.fully_connected(h, w["gate_h"]))
    new = b.tanh(b.fully_connected(x, w["new_x"]) + gate * b.fully_connected(h, w["new_h"]))
    following = h + gate * (new - h)
    b.output("h_out", following)
    b.output("y", b.fully_connected(following, w["read_out"]))
    return b.build()


def step_in_numpy(w: Weights, x: np.ndarray, h: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute the same step in NumPy. Return (next state, output)."""
    gate = 1 / (1 + np.exp(-(x @ w["gate_x"].T + h @ w["gate_h"].T)))
    new = np.tanh(x @ w["new_x"].T + gate * (h @ w["new_h"].T))
    following = (h + gate * (new - h)).astype(np.float32)
    return following, following @ w["read_out"].T


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--units", type=int, default=256)
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    units, steps = options.units, options.steps
    if units < 1 or steps < 1:
        parser.error("--units and --steps are at least 1")

    w = make_weights(units)
    t = np.arange(steps)[:, None] / 20 + np.arange(FEATURES)
    signal = (np.sin(t) + np.random.default_rng(2).normal(size=t.shape) / 10).astype(np.float32)

    expected, h = [], np.zeros((1, units), np.float32)
    for x in signal:
        h, y = step_in_numpy(w, x[None], h)
        expected.append(float(y[0, 0]))

    with nnburst.launch() as service, service.session(build(w, units)) as session:
        with session.bind(state={"h_out": "h_in"}) as bound:
            found = []
            started = time.perf_counter()
            for x in signal:
                bound.inputs["x"][...] = x
                bound.run()
                found.append(float(bound.outputs["y"][0, 0]))
            kept = (time.perf_counter() - started) / steps
            state = bound.get_state()["h_in"]  # the state is copied once, to inspect it

        state_here = np.zeros((1, units), np.float32)
        started = time.perf_counter()
        for x in signal:
            state_here, _ = session.run(["h_out", "y"], {"x": x[None], "h_in": state_here})
        copied = (time.perf_counter() - started) / steps

    worst = float(np.max(np.abs(np.array(found) - expected)))
    print(f"{steps} steps of {units} units, state of {4 * units} bytes")
    print(f"state in the device:   {1e6 * kept:8.1f} µs a step")
    print(f"copied in and out:     {1e6 * copied:8.1f} µs a step")
    print(f"largest difference from NumPy: {worst:.1e}")
    same = worst < 1e-3 and np.allclose(state, h, atol=1e-3) and np.allclose(state, state_here, atol=1e-5)
    print("the results agree" if same else "the results DIFFER")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
