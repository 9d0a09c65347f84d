"""How the model checkers are called: GenMC on the programs beside this file, Spin on the protocol model."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
CORE = HERE.parents[1] / "csrc"
MODELS = ("rc11", "imm")
PROGRAMS = sorted(path.stem for path in HERE.glob("*.c"))
PROTOCOLS = sorted(path.stem for path in HERE.glob("*.pml"))

# The cache of instructions loses stack variables in long runs. No loop is to be taken for a wait but those of model.h.
_GENMC = (
    "--check-liveness",
    "--disable-estimation",
    "--disable-instruction-caching",
    "--disable-load-annotation",
    "--disable-spin-assume",
    "--disable-warn-on-unfreed-memory",
    "--print-error-trace",
)


@dataclass(frozen=True)
class Outcome:
    """What a checker says: ``proven``, ``error`` (and which), ``broken`` (it did not run) or ``timeout``."""

    verdict: str
    detail: str = ""
    trace: str = ""
    """Of the execution that fails."""


def genmc(program: str, model: str, core: Path = CORE, timeout: float | None = None) -> Outcome:
    """Explore all executions of a program over the C files in `core`."""
    source = HERE / f"{program}.c"
    command = ["genmc", f"--{model}", *_GENMC, "--", f"-I{core}", f"-I{HERE}", str(source)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return Outcome("timeout", f"no answer within {timeout:g} s")
    text = done.stdout + done.stderr
    lines = [line.strip() for line in text.splitlines()]
    if done.returncode == 0 and "No errors were detected." in lines:
        count = next((line.rpartition(" ")[2] for line in lines if "complete executions" in line), "0")
        if count == "0":
            return Outcome("error", "no execution of it is complete, so nothing was checked")
        return Outcome("proven", f"{count} executions")
    error = next((line for line in lines if line.startswith("Error:")), None)
    if error is None:
        return Outcome("broken", text[-2000:])
    what = next((line for line in lines if line.startswith(("Assertion violation", "Non-terminating"))), "")
    return Outcome("error", f"{error} {what}".strip(), text)


def spin(protocol: str, define: str = "", timeout: float | None = None) -> Outcome:
    """Explore all states of a protocol model; `define` leaves something out of it."""
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copy(HERE / f"{protocol}.pml", scratch)
        flags = [f"-D{define}"] if define else []
        steps = (
            ["spin", *flags, "-a", f"{protocol}.pml"],
            ["cc", "-O2", "-DSAFETY", "-w", "-o", "pan", "pan.c"],
            ["./pan", "-m1000000"],
        )
        for step in steps:
            try:
                done = subprocess.run(step, cwd=scratch, capture_output=True, text=True, timeout=timeout, check=False)
            except subprocess.TimeoutExpired:
                return Outcome("timeout", f"no answer within {timeout:g} s")
            if done.returncode:
                return Outcome("broken", done.stdout + done.stderr)
        text = done.stdout
        replay = ["spin", *flags, "-t", "-p", f"{protocol}.pml"]
        trace = subprocess.run(replay, cwd=scratch, capture_output=True, text=True, check=False).stdout
    found = next((line.strip() for line in text.splitlines() if line.startswith("pan:1:")), "")
    if "errors: 0" in text and "max search depth too small" not in text:
        states = next((line.split()[0] for line in text.splitlines() if "states, stored" in line), "?")
        return Outcome("proven", f"{states} states")
    return Outcome("error", found, trace) if found else Outcome("broken", text)


def missing(*tools: str) -> list[str]:
    """Those of the tools that are not on the PATH."""
    return [tool for tool in tools if not shutil.which(tool)]
