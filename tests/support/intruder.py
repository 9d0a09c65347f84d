"""Models that have taken over their process: a device runs a test's function in a worker of a shared service."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nnburst
from nnburst.errors import GeneralFailure
from support import ROOT
from support.services import Shared, shared_service

MOST_INLINE = 128
"""Maximum bytes of a constant that is stored in the model itself."""
DEVICE = """
import contextlib, json, os
from nnburst.devices import LocalDevice
from nnburst.errors import GeneralFailure

{setup}
class Hostile(LocalDevice):
    name = "hostile"

    def why_not(self, model, operation):
        return ""

    def get_number_of_cache_files_needed(self):  # so that it gets a trust store
        return 1, 1

    def compile(self, model):
        raise GeneralFailure("said:" + json.dumps({name}(*json.loads(model.operand_values))) + "said:")

{function}
"""


@contextlib.contextmanager
def hostile_service(
    directory: Path, function: Callable[..., object], *options: str, setup: str = "", **process: Any
) -> Iterator[Shared]:
    """Run a shared service. When its device compiles a model, the device calls a function with `attack`'s arguments.

    Args:
        directory: Directory of the service's files.
        function: The function, whose source is copied. It may use `contextlib`, `json`, `os` and names of the setup.
        options: Options of `nnburst serve`.
        setup: Statements that run when the device is imported, before the worker enters its sandbox.
        process: Options of `Shared` or `subprocess.Popen`.
    """
    code = directory / "code"
    (code / "hostile-1.dist-info").mkdir(parents=True)
    (code / "hostile-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: hostile\nVersion: 1\n")
    (code / "hostile-1.dist-info" / "entry_points.txt").write_text("[nnburst.devices]\nhostile = hostile:Hostile\n")
    source = textwrap.dedent(inspect.getsource(function))
    (code / "hostile.py").write_text(DEVICE.format(setup=setup, name=function.__name__, function=source))
    env = {"PYTHONPATH": f"{ROOT}{os.pathsep}{code}", "NNBURST_STATE_DIR": str(directory / "state")}
    with shared_service(directory, "--device", "hostile", *options, env=env, **process) as shared:
        yield shared


def attack(address: str, *arguments: object) -> Any:
    """Call the function in the worker of this user's models. Return its result."""
    with nnburst.connect(address) as service:
        return attack_with(service, *arguments)


def attack_with(service: nnburst.Service, *arguments: object) -> Any:
    """Call the function as `attack` does, over an open connection."""
    text = json.dumps(arguments).encode()
    text += b" " * (-len(text) % MOST_INLINE)
    b = nnburst.ModelBuilder()
    y = b.input("x", nnburst.OperandType.TENSOR_INT32, (MOST_INLINE // 4,))
    for chunk in np.frombuffer(text, np.int32).reshape(-1, MOST_INLINE // 4):
        y = b.maximum(y, chunk)
    b.output("y", y)
    with pytest.raises(GeneralFailure, match="said:") as failure:
        service.session(b.build(), device="hostile")
    return json.loads(str(failure.value).split("said:")[1])
