"""ONNX's own conformance suite through a burst; all of it with ``-m soak``."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx.backend.test.loader import load_model_tests
from onnx_suite import REFUSED as WORDS_OF_A_REFUSAL
from onnx_suite import Outcome, compare
from test_onnx_values import CASES, ECHO, OPTIONALS, SEQUENCES, ZIPMAP

import nnburst
from nnburst import GeneralFailure
from nnburst.devices.onnxruntime import capi
from nnburst.devices.onnxruntime.importer import import_graph
from nnburst.devices.onnxruntime.library import onnxruntime
from support import ROOT
from support.onnx_models import FLOAT, TensorProto, graph, helper, node


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONNX_HOME", str(tmp_path_factory.mktemp("onnx-home")))  # the suite keeps copies of networks there
        yield


def check(pattern: str, at_least: int) -> None:
    passed = 0
    lost: list[Outcome] = []
    for ours, theirs in compare(pattern):
        passed += ours.kind == "passed"
        if theirs.kind == "passed" and ours.kind != "passed":
            lost.append(ours)
    assert not lost
    assert passed >= at_least


@pytest.mark.check
def test_cases_that_pass_in_process_pass_through_a_burst() -> None:
    check("^test_(a(?!tt)|b|d|re|sp|if|loop|scan)|string|sequence|optional|label_enc", 290)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_every_case_that_passes_in_process_passes_through_a_burst() -> None:
    check("", 1200)


def _of(kind: Any) -> bytes:
    """A model that passes on what is of this type."""
    values = ([helper.make_value_info(name, kind)] for name in "xy")
    made = helper.make_graph([node("Identity", ["x"], ["y"])], "one", *values)
    return bytes(helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)]).SerializeToString())


_tensor, _sequence, _optional, _map = (
    helper.make_tensor_type_proto,
    helper.make_sequence_type_proto,
    helper.make_optional_type_proto,
    helper.make_map_type_proto,
)
_T = TensorProto
FLOATS = _tensor(_T.FLOAT, None)
ELEMENTS = {"complex": "COMPLEX", "2-bit": "INT2", "float8e8m0": "FLOAT8E8M0", "6-bit": "FLOAT6"}
ODD_MAPS = [(_T.INT32, FLOATS), (_T.FLOAT, FLOATS), (_T.STRING, _tensor(_T.BOOL, None)), (_T.INT64, _sequence(FLOATS))]
REFUSED: dict[str, list[Any]] = {
    "complex": [_tensor(n, None) for name, n in _T.DataType.items() if any(map(name.count, ELEMENTS.values()))],
    "sparse": [helper.make_sparse_tensor_type_proto(_T.FLOAT, [2])],
    "sequences of": [
        *(_sequence(kind) for kind in (_sequence(FLOATS), _optional(FLOATS), _sequence(_map(_T.INT64, FLOATS)))),
        *(_map(*odd) for odd in ODD_MAPS),
        *(_sequence(_map(*odd)) for odd in ODD_MAPS),
        _optional(_optional(FLOATS)),
    ],
    "strings": [],
}
"""By the first words of each line of the page; the last line is of what needs the C library."""


def _page() -> list[str]:
    text = (ROOT / "docs" / "onnx.md").read_text().split("<!-- refused -->")[1].split("<!-- end -->")[0]
    return [" ".join(line.split()) for line in text.split("\n- ")[1:]]


def test_page_lists_every_element_that_is_refused_and_no_other() -> None:
    (line,) = (line for line in _page() if line.startswith("complex"))
    refused = set()
    for name, number in _T.DataType.items():
        if number:
            try:
                import_graph(_of(_tensor(number, None)))
            except GeneralFailure:
                refused |= {word for word, start in ELEMENTS.items() if start in name} or {name}
    assert refused == {word for word in ELEMENTS if word in line} == set(ELEMENTS)


def test_every_line_of_the_page_is_refused_by_the_name_of_the_input() -> None:
    lines = _page()
    for line, start in zip(lines, REFUSED, strict=True):
        assert line.startswith(start)
    for kind in (kind for kinds in REFUSED.values() for kind in kinds):
        with pytest.raises(GeneralFailure, match="input 'x'"):
            import_graph(_of(kind))


def test_what_needs_the_library_is_refused_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is taken with it: test_onnx_values.py."""
    four = graph(
        [node("DequantizeLinear", ["q", "s"], ["y"])],
        [("q", TensorProto.INT4, (1,))],
        [("y", FLOAT, (1,))],
        {"s": np.float32(1)},
    )
    four.opset_import[0].version = 21
    needing = {
        "strings": [ECHO],
        "sequences": [SEQUENCES],
        "maps": [ZIPMAP, CASES["map"][0]],
        "optionals": [OPTIONALS],
        "4-bit numbers": [four.SerializeToString()],
    }
    (line,) = (line for line in _page() if line.startswith("strings"))
    assert line.partition(", if ")[0].replace(" and ", ", ").split(", ") == list(needing)
    monkeypatch.setattr(capi, "load", lambda: False)
    onnxruntime.cache_clear()
    try:
        with nnburst.in_process(devices=["nnburst-onnxruntime"]) as service:
            for data in (data for models in needing.values() for data in models):
                with pytest.raises(GeneralFailure, match="hold other values than numbers; that needs the C library"):
                    service.session(data)
    finally:
        onnxruntime.cache_clear()


@pytest.mark.check
def test_cases_of_the_suite_that_are_refused_are_listed_and_pass_nowhere() -> None:
    refused = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = [case for kind in ("node", "simple") for case in load_model_tests(kind=kind)]
    for case in cases:
        data = case.model.SerializeToString() if case.model else (Path(case.model_dir) / "model.onnx").read_bytes()
        try:
            import_graph(data)
        except GeneralFailure as error:
            assert WORDS_OF_A_REFUSAL.search(str(error)), case.name
            refused.add(f"{case.name}_cpu")
    outcomes = list(compare(f"^({'|'.join(refused)})$"))
    assert {ours.name for ours, _ in outcomes} == refused
    assert not [ours for ours, theirs in outcomes if theirs.kind == "passed"]
