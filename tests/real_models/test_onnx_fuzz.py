"""Whatever random graph ONNX Runtime runs in process runs through a burst, with the same bits."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from typing import Any

import numpy as np
import onnx_fuzz
import pytest

import nnburst
from nnburst import NNBurstError
from support.onnx_models import ort

LISTED = re.compile(r"do not fit together|of no elements")
"""What docs/internals/onnx.md says fails here: ONNX Runtime returns memory that it never wrote."""


def _alike(a: Any, b: Any) -> bool:
    """Whether what ONNX Runtime answers, and then what the service does, are the same to the bit."""
    if a.size == b.size == 0:  # of a Loop of no trips ONNX Runtime guesses the sizes of what it never had
        return a.dtype == b.dtype and a.ndim == b.ndim
    shape = b.shape if a.size == b.size == 1 else a.shape  # one element has the rank that it is declared with
    return (a.dtype, shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def compare(service: nnburst.Service, seeds: range) -> Counter[str]:
    """Run the graphs of some seeds on both sides; counts what happened, and fails where it differs."""
    counts: Counter[str] = Counter()
    different = []
    quiet = ort.RunOptions()
    quiet.log_severity_level = 4
    for seed in seeds:
        made = onnx_fuzz.example(seed)
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 4
        try:
            theirs = ort.InferenceSession(made.model, options, providers=["CPUExecutionProvider"])
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
            for number, inputs in enumerate(made.inputs):
                place = f"seed {seed}, run {number}, { {name: array.shape for name, array in inputs.items()} }"
                try:
                    expected = theirs.run(None, inputs, quiet)
                except Exception:
                    counts["not run there"] += 1
                    continue
                counts["with empty inputs"] += any(array.size == 0 for array in inputs.values())
                try:
                    got = session.run(None, inputs)
                except NNBurstError as error:
                    if LISTED.search(str(error)):
                        counts["refused as listed"] += 1
                    else:
                        different.append(f"{place}: {error}")
                    continue
                counts["run"] += 1
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
