"""ONNX's own conformance suite, case by case, through a burst and with onnxruntime in this process.

``python tests/real_models/onnx_suite.py [PATTERN]`` (`make conformance-onnx`) prints what passes, fails and is skipped
on both sides, and every case that passes in process and not through the burst. The exit status is 1 if one of those was
not refused for what it holds.
"""

from __future__ import annotations

import contextlib
import io
import os
import platform
import re
import sys
import tempfile
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np

from nnburst import InvalidArgument, Service, Session, launch

_DEVICE = "nnburst-onnxruntime"
REFUSED = re.compile(r"holds (complex|2-bit|elements of type)|which cannot be passed to a model")
"""What the device says of arguments that a burst does not carry; docs/onnx.md has the list."""


class Prepared:
    """A model in the service: ``onnx.backend.base.BackendRep``."""

    def __init__(self, session: Session, dtypes: list[Any]) -> None:
        self._session, self._dtypes = session, dtypes

    def run(self, inputs: list[Any], **options: Any) -> tuple[Any, ...]:
        names = [argument.name for argument in self._session.get_inputs()]
        outputs = self._session.run(None, dict(zip(names, inputs, strict=True)))
        return tuple(_as_onnx(output, dtype) for output, dtype in zip(outputs, self._dtypes, strict=True))


class BurstBackend:
    """``onnx.backend.base.Backend`` over a service, in which every run goes through a burst."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def is_compatible(self, model: Any) -> bool:
        return True  # whether it can run turns out as it is prepared

    def supports_device(self, device: str) -> bool:
        return device == "CPU"

    def prepare(self, model: Any, device: str, **options: Any) -> Prepared:
        if not self.supports_device(device):
            raise InvalidArgument(f"device {device!r} is not supported; choose 'CPU'")
        session = self._service.session(model.SerializeToString(), device=_DEVICE)
        return Prepared(session, [_dtype(value) for value in model.graph.output])


def _as_onnx(output: Any, dtype: Any) -> Any:
    """Return an output with the types of arrays that the onnx package has: strings are objects."""
    if isinstance(output, list):
        return [_as_onnx(item, None) for item in output]
    if not isinstance(output, np.ndarray):
        return output
    if output.dtype.kind == "T":
        return output.astype(object)
    if dtype is None or dtype == output.dtype:
        return output
    return output.astype(dtype) if "int" in dtype.name else output.view(dtype)


def _dtype(value: Any) -> Any:
    """The NumPy type that the onnx package has for an output, also where it comes from another library."""
    import onnx

    number = value.type.tensor_type.elem_type
    return onnx.helper.tensor_dtype_to_np_dtype(number) if number else None


@dataclass(frozen=True)
class Outcome:
    """Of one case on one side."""

    name: str
    kind: str
    """passed, failed, skipped or refused."""
    message: str = ""


def cases(backend: Any, pattern: str = "") -> dict[str, Callable[[], None]]:
    """The suite's test functions for the CPU, by name."""
    import onnx.backend.test

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        suite = onnx.backend.test.BackendTest(backend, __name__)
        found: dict[str, Callable[[], None]] = {}
        for case in suite.test_cases.values():
            for name in sorted(vars(case)):
                if name.startswith("test_") and name.endswith("_cpu") and re.search(pattern, name):
                    found[name] = getattr(case(name), name)
    return found


def outcome(name: str, function: Callable[[], None]) -> Outcome:
    """Run one case."""
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            function()
    except unittest.SkipTest as error:
        return Outcome(name, "skipped", str(error))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return Outcome(name, "refused" if REFUSED.search(text) else "failed", text)
    return Outcome(name, "passed")


def compare(pattern: str = "") -> Iterator[tuple[Outcome, Outcome]]:
    """Run every case through the burst and in process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it imports what onnx deprecates
        import onnxruntime.backend

    onnxruntime.set_default_logger_severity(4)
    theirs = cases(onnxruntime.backend.backend.OnnxRuntimeBackend, pattern)
    with launch(devices=[_DEVICE]) as service:
        for name, function in cases(BurstBackend(service), pattern).items():
            yield outcome(name, function), outcome(name, theirs[name])


def main(pattern: str = "") -> int:
    """Print the table."""
    with tempfile.TemporaryDirectory(prefix="nnburst-onnx-") as home:  # the suite keeps copies of its networks there
        os.environ["ONNX_HOME"] = home
        return _table(pattern)


def _table(pattern: str) -> int:
    here, there = Counter[str](), Counter[str]()
    lost: list[Outcome] = []
    refused = 0
    for ours, theirs in compare(pattern):
        here[ours.kind] += 1
        there[theirs.kind] += 1
        if theirs.kind == "passed" and ours.kind == "refused":
            refused += 1
        elif theirs.kind == "passed" and ours.kind != "passed":
            lost.append(ours)
    for case in lost:
        print(f"LOST {case.name}: {case.kind}: {case.message.splitlines()[0][:200] if case.message else ''}")
    print(f"ONNX {version('onnx')}, ONNX Runtime {version('onnxruntime')}, CPython {platform.python_version()}")
    print(f"{'':24}{'passed':>8}{'failed':>8}{'refused':>8}{'skipped':>8}")
    for title, counts in (("through a burst", here), ("onnxruntime in process", there)):
        print(f"{title:24}" + "".join(f"{counts[kind]:8}" for kind in ("passed", "failed", "refused", "skipped")))
    print(f"pass in process, refused through the burst: {refused}")
    print(f"pass in process, fail through the burst: {len(lost)}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
