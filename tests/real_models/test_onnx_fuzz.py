"""Whatever random graph ONNX Runtime runs in process runs through a burst, with the same bits."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import onnx_fuzz
import onnx_value_fuzz
import pytest

import nnburst
from nnburst import NNBurstError
from support.onnx_models import ort

LISTED = re.compile(r"do not fit together|of no elements")
"""What docs/onnx.md says fails here: ONNX Runtime returns memory that it never wrote."""


@pytest.fixture(scope="module")
def service() -> Iterator[nnburst.Service]:
    with nnburst.launch(devices=["nnburst-onnxruntime:threads=1"]) as service:
        yield service


def _alike(a: Any, b: Any) -> bool:
    """Whether what ONNX Runtime answers, and then what the service does, are the same to the bit."""
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(_alike, a, b))
    if not isinstance(a, np.ndarray):
        return type(a) is type(b) and bool(a == b)
    if a.dtype.kind == "O":
        return isinstance(b, np.ndarray) and (a.shape, a.tolist()) == (b.shape, b.tolist())
    if a.size == b.size == 0:  # of a Loop of no trips ONNX Runtime guesses the sizes of what it never had
        return a.dtype == b.dtype and a.ndim == b.ndim
    shape = b.shape if a.size == b.size == 1 else a.shape  # one element has the rank that it is declared with
    return (a.dtype, shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def _numbers(bits: Any, name: str) -> Any:
    """What elements that NumPy lacks are as floats; those of 4 bits are numbers already."""
    return bits.astype(np.float32) if name.endswith("int4") else bits.view(getattr(ml_dtypes, name)).astype(np.float32)


def compare(
    service: nnburst.Service, seeds: range, example: Callable[[int], Any] = onnx_fuzz.example, most: int = 1 << 30
) -> Counter[str]:
    """Run the graphs of some seeds on both sides; counts what happened, and fails where it differs.

    Args:
        service: Ours.
        seeds: Of the graphs.
        example: Makes one.
        most: Graphs that ONNX Runtime opens; the other seeds are left out.
    """
    counts: Counter[str] = Counter()
    different = []
    quiet = ort.RunOptions()
    quiet.log_severity_level = 4
    for seed in seeds:
        if counts["opened"] == most:
            break
        made = example(seed)
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 4
        try:
            for model in dict.fromkeys((made.model, getattr(made, "twin", made.model))):
                theirs = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except Exception:
            counts["not opened there"] += 1
            continue
        counts["opened"] += 1
        try:
            session = nnburst.Session(made.model, service=service)
        except NNBurstError as error:
            different.append(f"{seed}: not opened: {error}")
            continue
        with session:
            for number, (inputs, twins) in enumerate(
                zip(made.inputs, getattr(made, "twin_inputs", made.inputs), strict=True)
            ):
                place = f"seed {seed}, run {number}, { {name: getattr(a, 'shape', a) for name, a in inputs.items()} }"
                try:
                    expected = theirs.run(None, twins, quiet)
                except Exception:
                    counts["not run there"] += 1
                    continue
                counts["with empty inputs"] += any(
                    np.size(array) == 0 for array in inputs.values() if isinstance(array, np.ndarray)
                )
                try:
                    got = session.run(None, inputs)
                except NNBurstError as error:
                    if LISTED.search(str(error)):
                        counts["refused as listed"] += 1
                    else:
                        different.append(f"{place}: {error}")
                    continue
                counts["run"] += 1
                for position, lacking in enumerate(getattr(made, "lacking", ())):
                    if lacking:
                        counts[f"gave {lacking}"] += 1
                        got[position] = _numbers(got[position], lacking)
                counts["took maps"] += any(isinstance(value, dict) for value in inputs.values())
                if "lacking" in inputs:
                    counts[f"took {inputs['lacking'].dtype.name}"] += 1
                pairs = list(zip(expected, got, strict=True))
                if not all(_alike(a, b) for a, b in pairs):
                    different.append(f"{place}: {expected} there, {got} here")
    print(dict(counts))
    assert not different, "\n".join([f"{len(different)} differ", *different[:20]])
    return counts


@pytest.mark.check
def test_random_graphs_give_the_bits_that_they_give_in_process(service: nnburst.Service) -> None:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        assert compare(service, range(100))["run"] >= 80


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_thousands_of_random_graphs_give_the_bits_that_they_give_in_process(service: nnburst.Service) -> None:
    assert compare(service, range(3000))["run"] >= 2500


KINDS = ["took maps", *(f"{way} {name}" for way in ("took", "gave") for name in onnx_value_fuzz.LACKING)]


@pytest.mark.check
def test_random_graphs_of_values_give_the_bits_that_they_give_in_process(service: nnburst.Service) -> None:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        counts = compare(service, range(500), onnx_value_fuzz.example, 150)
    assert counts["opened"] == 150
    assert counts["run"] >= 150
    assert all(counts[kind] for kind in KINDS)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_ten_thousand_graphs_of_values_give_the_bits_that_they_give_in_process(service: nnburst.Service) -> None:
    """Graphs that ONNX Runtime itself does not open count for nothing."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        counts = compare(service, range(20_000), onnx_value_fuzz.example, 10_000)
    assert counts["opened"] == 10_000
    assert counts["run"] >= 10_000
    assert counts["refused as listed"] <= counts["run"] / 100
    assert min(counts[kind] for kind in KINDS) >= 100
