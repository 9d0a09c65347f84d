"""The units of `deploy/systemd`: what they deny, and that a service works with what is left to it."""

from __future__ import annotations

import ctypes.util
import json
import shutil
import signal
import subprocess
import sys
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from under_systemd import settings

import nnburst
from nnburst import Model, ModelBuilder, OperandType
from support import ROOT
from support.services import save_scaling, shared_service
from support.waiting import PATIENCE

UNITS = ROOT / "deploy" / "systemd"
SERVICE, NETWORK = UNITS / "nnburst.service", UNITS / "network.conf"
DENIED = {
    "CapabilityBoundingSet": "",
    "IPAddressDeny": "any",
    "RestrictAddressFamilies": "AF_UNIX",
    "SystemCallArchitectures": "native",
    "ProtectSystem": "strict",
    "ProtectProc": "invisible",
    "UMask": "0077",
    **dict.fromkeys(("DynamicUser", "LockPersonality", "MemoryDenyWriteExecute", "NoNewPrivileges"), "yes"),
    **dict.fromkeys(("PrivateDevices", "PrivateMounts", "PrivateNetwork"), "yes"),
    **dict.fromkeys(("ProtectClock", "ProtectHome", "ProtectHostname"), "yes"),
    **dict.fromkeys(("ProtectKernelLogs", "ProtectKernelModules", "ProtectKernelTunables"), "yes"),
    **dict.fromkeys(("RestrictNamespaces", "RestrictRealtime"), "yes"),
}


def test_unit_denies_what_the_service_does_not_need() -> None:
    unit = settings(SERVICE)
    assert {name: unit.get(name, [])[-1:] for name in DENIED} == {name: [value] for name, value in DENIED.items()}
    first, *rest = unit["SystemCallFilter"]
    assert first == "@system-service"  # so it is a list of what is allowed
    assert any(line.startswith("~") and "@privileged" in line for line in rest)
    assert unit["SystemCallErrorNumber"] == ["EPERM"]  # a library that tries something else is told, not killed


def test_unit_has_groups_of_its_own_which_nothing_hides() -> None:
    unit = settings(SERVICE)
    assert set(unit["Delegate"][-1].split()) == {"cpu", "memory", "pids"}
    assert unit["OOMPolicy"] == ["continue"]  # one worker's end is not the unit's
    assert "ProtectControlGroups" not in unit


def test_account_of_the_unit_has_another_name_than_the_group_of_its_clients() -> None:
    unit = settings(SERVICE)
    group = unit["ExecStart"][-1].partition("--allow-gid ")[2].split()[0]
    assert unit.get("User", [SERVICE.stem])[-1] != group  # which is there: systemd makes no account of its name


def test_network_is_the_loopback_interface_alone() -> None:
    unit, network = settings(SERVICE), settings(SERVICE, NETWORK)
    assert network["IPAddressDeny"] == ["any"]
    assert network["IPAddressAllow"] == ["localhost"]
    changed = {name for name in network if network[name] != unit.get(name)}
    assert changed == {"ExecStart", "PrivateNetwork", "RestrictAddressFamilies", "IPAddressAllow"}


# ---- a service under these filters -----------------------------------------------------------------------------


def can_filter() -> bool:
    return shutil.which("systemd-analyze") is not None and ctypes.util.find_library("seccomp") is not None


filtering = pytest.mark.skipif(not can_filter(), reason="needs systemd-analyze and libseccomp")


def needs(**extras: str) -> None:
    """Skip if the service could not import a module. It is not imported here: ONNX Runtime keeps files open."""
    for module, extra in extras.items():
        if find_spec(module) is None:
            pytest.skip(f"needs the extra nnburst[{extra}]")


def under(*units: Path) -> list[str]:
    """The beginning of a command that runs under what they say of system calls."""
    return [sys.executable, str(Path(__file__).with_name("under_systemd.py")), *map(str, units), "--"]


def doubling() -> Model:
    b = ModelBuilder()
    x = b.input("x", OperandType.TENSOR_FLOAT32, (4, 64))
    b.output("y", b.fully_connected(x, 2 * np.eye(64, dtype=np.float32)))
    return b.build()


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


@filtering
@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("import os; os.setpriority(os.PRIO_PROCESS, 0, 1)", "PermissionError"),
        ("import os; os.setuid(os.getuid())", "PermissionError"),
        ("import socket; socket.socket(socket.AF_INET)", "Address family not supported"),
        ("import mmap; mmap.mmap(-1, 4096, prot=mmap.PROT_WRITE | mmap.PROT_EXEC)", "PermissionError"),
    ],
)
def test_what_the_unit_denies_is_refused(program: str, error: str) -> None:
    command = [*under(SERVICE), sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 1
    assert error in done.stderr


@pytest.mark.check
@filtering
def test_service_works_under_the_filters_of_its_unit(tmp_path: Path) -> None:
    needs(onnxruntime="onnx")
    file = save_scaling(tmp_path / "scaling.onnx", 2.0)
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    with shared_service(tmp_path, "--model", f"double={file}", under=under(SERVICE)) as confined:
        assert status_of(confined.pid)["Seccomp"] == "2"
        for outcome in ("SAVED", "HIT"):
            with nnburst.connect(confined.address) as service:
                for model in ("double", file):
                    with service.session(model) as session:
                        for _ in range(100):
                            np.testing.assert_array_equal(session.run(None, {"x": values})[0], 2 * values)
                compilation = nnburst.nnapi.Compilation(doubling(), service.devices)
                compilation.set_caching_auto(tmp_path / "cache")
                compilation.finish()
                assert compilation.cache_report is not None
                assert compilation.cache_report.outcome == outcome
                with nnburst.nnapi.Burst(compilation) as burst, burst.bind() as execution:
                    execution.inputs["x"][:] = 1
                    execution.run()
                    assert (execution.outputs["y"] == 2).all()
            confined.process.send_signal(signal.SIGHUP)
    assert confined.log.read_text() == ""


@pytest.mark.check
@filtering
def test_gateway_and_metrics_work_where_the_network_is_allowed(tmp_path: Path) -> None:
    needs(onnxruntime="onnx", aiohttp="oip", prometheus_client="metrics")
    triton = pytest.importorskip("tritonclient.grpc", reason="needs the extra nnburst[oip]")
    options = ["--model", f"double={save_scaling(tmp_path / 'scaling.onnx', 2.0)}", "--metrics", "0"]
    options += ["--oip", "127.0.0.1:0", "--oip-rest", "127.0.0.1:0"]
    values = np.ones((3, 4), np.float32)
    with shared_service(tmp_path, *options, under=under(SERVICE, NETWORK)) as confined:
        tensor = {"name": "x", "shape": [3, 4], "datatype": "FP32", "data": [1.0] * 12}
        url = f"http://127.0.0.1:{confined.ready['oip']['rest']}/v2/models/double/infer"
        with urllib.request.urlopen(url, json.dumps({"inputs": [tensor]}).encode(), timeout=PATIENCE) as answer:
            assert json.load(answer)["outputs"][0]["data"] == [2.0] * 12
        with urllib.request.urlopen(confined.ready["metrics"], timeout=PATIENCE) as answer:
            assert b"nnburst_" in answer.read()
        with triton.InferenceServerClient(f"127.0.0.1:{confined.ready['oip']['grpc']}") as client:
            given = triton.InferInput("x", [3, 4], "FP32")
            given.set_data_from_numpy(values)
            np.testing.assert_array_equal(client.infer("double", [given]).as_numpy("y"), 2 * values)
    assert confined.log.read_text() == ""
