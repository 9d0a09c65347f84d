"""A shared service from where little is left to its client: other namespaces, and accounts that share no files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import nnburst
from support import ROOT
from support.processes import line_of, run_python
from support.services import shared_service
from support.waiting import PATIENCE

pytestmark = pytest.mark.check

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
SERVICE, CLIENT = 65533, 65534
"""User ids that own nothing else."""

MODEL = """
import json, os, sys
import numpy as np
import nnburst
from nnburst import ModelBuilder, OperandType

b = ModelBuilder()
x = b.input("x", OperandType.TENSOR_FLOAT32, (512, 256))
b.output("y", b.fully_connected(x, np.eye(256, dtype=np.float32)))
model = b.build()
value = np.arange(512 * 256, dtype=np.float32).reshape(512, 256)
"""

ENCLOSED = (
    MODEL
    + """
shm = os.statvfs("/dev/shm")
assert shm.f_blocks * shm.f_frsize == 1 << 16, shm
assert not os.listdir(sys.argv[2]), "the runtime directory is not hidden"
with nnburst.connect(sys.argv[1]) as service, service.session(model) as session:
    execution = session.bind()
    execution.inputs["x"][:] = value
    execution.run()
    assert (execution.outputs["y"] == value).all()
    assert (session.run(None, {"x": value})[0] == value).all()
print("right")
"""
)
ENCLOSE = """
set -e
mount -t tmpfs -o size=64k tmpfs /dev/shm
touch "$2/inside.sock"
mount --bind "$1/shared.sock" "$2/inside.sock"
mount -t tmpfs -o size=4k tmpfs "$1"
shift 2
exec "$@"
"""


def can_unshare() -> bool:
    return subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0


@as_root
@pytest.mark.skipif(not can_unshare(), reason="this process may not make a mount namespace")
def test_client_in_a_mount_namespace_needs_the_socket_alone(tmp_path: Path) -> None:
    """Not the runtime directory, and of /dev/shm less than one of its arrays."""
    run, inside = tmp_path / "run", tmp_path / "inside"
    run.mkdir(mode=0o700)
    inside.mkdir()
    with shared_service(run, "--device", "nnburst-reference"):
        program = [sys.executable, "-c", ENCLOSED, f"unix:{inside / 'inside.sock'}", str(run)]
        done = subprocess.run(
            ["unshare", "-m", "--propagation", "private", "sh", "-c", ENCLOSE, "sh", str(run), str(inside), *program],
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE,
            cwd=ROOT,
            check=False,
        )
        assert done.stdout == "right\n", done.stderr


# ---- a service in an account of its own, which no client can read or write ------------------------------------------

ACCOUNT = """
import importlib, os, pkgutil, sys
import nnburst, nnburst.cli
for found in pkgutil.walk_packages(nnburst.__path__, "nnburst."):  # with libraries that the account may not read
    if not found.name.split(".")[1] in ("gateway", "scale", "testing") and "__main__" not in found.name:
        try:
            importlib.import_module(found.name)
        except ImportError:  # an extra that is not installed
            pass
import cryptography.hazmat.primitives.hashes, cryptography.hazmat.primitives.kdf.hkdf  # the cache needs them later
def become(user):
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
"""
SERVE = (
    ACCOUNT
    + """
from nnburst.service.process.command import service_environment
os.environ.update(service_environment(os.environ))
become(int(sys.argv.pop(1)))
nnburst.cli.main()
"""
)
CACHED = (
    ACCOUNT
    + MODEL
    + """
address, directory, state = sys.argv[2:5]
service_uid = int(sys.argv[5])
nnburst.connect(address, trust_uid=service_uid).close()
become(int(sys.argv[1]))
try:
    os.listdir(state)
    raise SystemExit("the client can read the state of the service")
except PermissionError:
    pass

def report():
    with nnburst.connect(address, trust_uid=service_uid) as service:
        compilation = nnburst.nnapi.Compilation(model, service.devices)
        compilation.set_caching_auto(directory)
        compilation.finish()
        with nnburst.nnapi.Burst(compilation) as burst, burst.bind() as execution:
            execution.inputs["x"][:] = value
            execution.run()
            assert (execution.outputs["y"] == value).all()
        found = compilation.cache_report
        return [found.outcome, found.rejected and found.rejected.value]

def files():
    found = [os.path.join(d, f) for d, _, fs in os.walk(os.path.join(directory, "objects")) for f in fs]
    return [path for path in found if os.path.basename(path).startswith(("model.", "data."))]

said = [report(), report()]
for path in files():
    assert os.stat(path).st_uid == os.geteuid(), path
    with open(path, "r+b") as file:  # its own, so it may write what it likes
        last = file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(last)
        file.write(bytes([byte ^ 1]))
said += [report(), report()]
print(json.dumps({"said": said, "files": len(files())}), flush=True)
"""
)


def owned(path: Path, user: int) -> Path:
    path.mkdir(mode=0o700)
    os.chown(path, user, user)
    return path


def readable_package(directory: Path) -> Path:
    """Return a directory with a copy of the package: no other account may read this one if it is below a home."""
    package = shutil.copytree(Path(nnburst.__file__).parent, directory / "package" / "nnburst")
    for path in (package.parent, package, *package.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return package.parent


def runnable_by(user: int, file: str) -> bool:
    """Whether an account that has nothing to do with this one may run a program."""
    return (
        subprocess.run([file, "-c", ""], user=user, group=user, check=False).returncode == 0
        if all(path.stat().st_mode & 0o001 for path in Path(os.path.realpath(file)).parents)
        else False
    )


@as_root
def test_service_of_another_account_believes_only_what_it_wrote_itself(open_to_guests: Path) -> None:
    """T1: the client owns the files and may write any byte of them; the state is the service's alone."""
    if not runnable_by(SERVICE, sys.executable):
        pytest.skip(f"another account may not run {sys.executable}, as a service does for its workers")
    state, cache, run = (
        owned(open_to_guests / name, user) for name, user in (("state", SERVICE), ("cache", CLIENT), ("run", SERVICE))
    )
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("NNBURST_", "XDG_", "HOME"))
    } | {"HOME": "/nonexistent", "PYTHONPATH": str(readable_package(open_to_guests))}
    run.chmod(0o711)
    service = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(SERVICE), "serve", "--json", "--socket", str(run / "vision.sock"),
         "--device", "nnburst-reference", "--allow-uid", str(CLIENT)],
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
        env=environment | {"NNBURST_STATE_DIR": str(state / "own")},  # others get theirs beside it
    )  # fmt: skip
    try:
        ready = line_of(service)
        assert ready, "the service did not start"
        assert os.stat(f"/proc/{service.pid}").st_uid == SERVICE
        arguments = str(CLIENT), f"unix:{run / 'vision.sock'}", str(cache), str(state), str(SERVICE)
        done = run_python("-c", CACHED, *arguments, cwd="/", env=environment)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        assert found["files"] > 0
        assert found["said"] == [["SAVED", None], ["HIT", None], ["SAVED", "BAD_MAC"], ["HIT", None]]
        assert os.listdir(state), "the service has kept its key elsewhere"
        assert {entry.stat().st_uid for entry in state.rglob("*")} == {SERVICE}
        service.terminate()
        assert service.wait(PATIENCE) == 0
    finally:
        service.kill()
        service.wait()
        assert service.stdout is not None
        service.stdout.close()


# ---- a service that another account has put where a client looks ----------------------------------------------------

PLANTED = """
import json, os, socket, sys
import nnburst.runtime.open_service, nnburst.service.client.connection  # while it may read them
from nnburst.service.process.discovery import dial, running_services
directory, planter, client = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
os.environ["NNBURST_RUNTIME_DIR"] = directory
mode, owner = sys.argv[4], int(sys.argv[5])

def become(user):
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)

told, tell = os.pipe()
stay, leave = os.pipe()
if os.fork() == 0:
    os.close(leave)
    become(planter)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(directory + "/vision.sock")
        os.chmod(directory + "/vision.sock", 0o666)
        listener.listen()
        os.write(tell, b"x")
        os.read(stay, 1)  # until the client has ended
    os._exit(0)
os.read(told, 1)
os.chown(directory, owner, owner)
os.chmod(directory, int(mode, 8))
become(client)

def attempt(address, **options):
    try:
        dial(address, 5, **options).close()
        return "connected"
    except nnburst.DeviceUnavailable as error:
        return str(error)

def connected(address, **options):
    try:
        nnburst.connect(address, open_timeout=5, **options)
    except nnburst.DeviceUnavailable as error:
        return str(error)

print(json.dumps({
    "name": attempt("vision"),
    "path": attempt(f"unix:{directory}/vision.sock"),
    "other": attempt("vision", trust_uid=12345),
    "connect": connected("vision"),
    "one": attempt("vision", trust_uid=planter),
    "several": attempt("vision", trust_uid={1, planter}),
    "listed": [found.name for found in running_services()],
}))
"""


@as_root
@pytest.mark.parametrize("client", [CLIENT, 0])
@pytest.mark.parametrize(
    ("mode", "owner", "because"),
    [
        ("0711", SERVICE, f"is of user {SERVICE}"),
        ("0777", "client", "drwxrwxrwx"),
        ("0711", "client", f"is of user {SERVICE}, and this process trusts those of user"),
    ],
)
def test_service_that_another_account_has_planted_is_not_used(
    open_to_guests: Path, client: int, mode: str, owner: int | str, because: str
) -> None:
    run = owned(open_to_guests / "run", SERVICE)
    owner = client if owner == "client" else owner
    arguments = [str(run), str(SERVICE), str(client), mode, str(owner)]
    done = run_python("-c", PLANTED, *arguments)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert because in found["name"]
    assert "trust_uid=" in found["name"]
    assert found["connect"] == found["name"]
    assert because in found["other"]
    assert f"trust_uid={SERVICE}" in found["path"]
    trusted = "drwxrwxrwx" if mode == "0777" else "connected"
    assert trusted in found["one"]
    assert trusted in found["several"]
    assert found["listed"] == ([] if owner == SERVICE or mode == "0777" else ["vision"])
