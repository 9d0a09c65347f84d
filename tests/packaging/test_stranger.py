"""A stranger has a wheel, the pages and a bare system: each step of theirs prints what its page says."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import ROOT

PARTS = (
    ("docs/index.md", "Installation"),
    ("README.md", "Example"),
    ("docs/sharing.md", ""),
    ("docs/gateway.md", ""),
)
"""Pages in the order in which they are read, and the section of each; without one, what is above the first."""

NOBODY = 65534
HOME = Path("/home")
ENTER = f"""
set -e
cd "$1"; shift
for part in usr etc opt proc sys dev; do mount --rbind "/$part" "$part"; done
exec /usr/sbin/chroot --userspec={NOBODY}:{NOBODY} . "$@"
"""
"""Runs a program without rights where there is a system, and nothing of this machine's users."""


def missing() -> str:
    """What this machine lacks for a bare system."""
    if os.geteuid() != 0:
        return "only root can change its root"
    for path in ("/usr/bin/curl", "/usr/bin/python3", "/usr/bin/unshare"):
        if not os.path.exists(path):
            return f"there is no {path}"
    can = subprocess.run(
        ["unshare", "--mount", "/usr/bin/python3", "-c", "import venv, ensurepip"], capture_output=True
    )
    return "" if can.returncode == 0 else f"no namespace, or no venv: {can.stderr.decode()}"


pytestmark = [pytest.mark.soak, pytest.mark.skipif(bool(missing()), reason=missing())]


class Stranger:
    """Does what a page says, and knows nothing else."""

    def __init__(self, root: Path) -> None:
        self.root, self.home = root, root / HOME.relative_to("/")
        self.service: subprocess.Popen[str] | None = None
        for part in ("usr", "etc", "opt", "proc", "sys", "dev", "tmp", "home"):
            (root / part).mkdir()
        for link in (link for link in map(Path, ("/bin", "/lib", "/lib64")) if link.is_symlink()):
            (root / link.name).symlink_to(link.readlink())
        (root / "tmp").chmod(0o1777)
        os.chown(self.home, NOBODY, NOBODY)

    def starts(self, command: str) -> subprocess.Popen[str]:
        """Start a command line."""
        environment = {"HOME": str(HOME), "PATH": f"{HOME}/env/bin:/usr/bin:/bin"}
        environment |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}  # its registry
        line = ["unshare", "--mount", "sh", "-c", ENTER, "enter", self.root, "/bin/sh", "-c", f"cd && exec {command}"]
        return subprocess.Popen(
            line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )

    def runs(self, command: str) -> str:
        """Run a command line that succeeds, and return what it prints."""
        begin = time.monotonic()
        with self.starts(command) as process:
            try:
                said, _ = process.communicate()
            finally:
                process.kill()
        print(f"{time.monotonic() - begin:6.1f} s  {command}")
        assert process.returncode == 0, f"{command}\n{said}"
        return said

    def serves(self, command: str) -> None:
        """Start a service in place of the one that runs, and wait until it says that it is ready."""
        self.interrupts()
        begin = time.monotonic()
        self.service = self.starts(command)
        assert self.service.stdout is not None
        said = self.service.stdout.readline()
        print(f"{time.monotonic() - begin:6.1f} s  {command}")
        assert "ready at" in said, said + self.service.stdout.read()

    def interrupts(self) -> None:
        """End the service that runs, as Ctrl-C does."""
        if self.service is not None:
            os.killpg(self.service.pid, signal.SIGINT)
            said, _ = self.service.communicate()
            assert self.service.returncode == 0, said
            self.service = None

    def follows(self, text: str) -> None:
        """Do what the blocks of a text say; what a program prints is in its next sentence."""
        found = re.findall(r"^```(\w+)\n(.*?)^```\n(?=\s*(.*?)$)", text, re.DOTALL | re.MULTILINE)
        assert len(found) == text.count("```") / 2 > 0, "a block that cannot be followed"
        for language, block, then in found:
            if language == "sh":
                for line in block.splitlines():
                    self.serves(line) if line.startswith("nnburst serve ") else self.runs(line)
            elif language == "python":
                (self.home / "program.py").write_text(block)
                promised = re.match(r"This prints `(.*?)`", then)
                assert self.runs("python program.py") == (f"{promised.group(1)}\n" if promised else "")
            else:
                assert language == "console"
                for command, printed in re.findall(r"^\$ (.*)\n((?:[^$].*\n)*)", block, re.MULTILINE):
                    pattern = re.escape(printed.strip()).replace("…", ".*")
                    assert re.fullmatch(pattern, self.runs(command).strip()), printed


@pytest.fixture
def stranger(tmp_path: Path) -> Iterator[Stranger]:
    """A stranger who has the wheel of this tree, and an environment of their own."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    (tmp_path / "tree").mkdir()
    copy = ["xargs", "-0", "cp", "--parents", "--target-directory", tmp_path / "tree"]
    subprocess.run(copy, input=files, cwd=ROOT, check=True)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*build, tmp_path / "dist", tmp_path / "tree"], check=True)
    (tmp_path / "root").mkdir()
    stranger = Stranger(tmp_path / "root")
    for wheel in (tmp_path / "dist").iterdir():
        shutil.copy(wheel, stranger.home)
    shutil.rmtree(tmp_path / "tree")
    try:
        yield stranger
    finally:
        if stranger.service is not None:
            os.killpg(stranger.service.pid, signal.SIGKILL)
            stranger.service.communicate()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.timeout(600, func_only=True)  # ten minutes are the promise
def test_stranger_gets_what_the_pages_say(stranger: Stranger) -> None:
    stranger.runs("python3 -m venv env")
    ports = {port: str(free_port()) for port in ("8000", "8001")}
    for page, section in PARTS:
        text = (ROOT / page).read_text(encoding="utf-8")
        _, _, text = text.partition(f"\n## {section}\n") if section else ("", "", text)
        text = text.partition("\n## ")[0]
        stranger.follows(re.sub(r"(?<=127\.0\.0\.1:)\d+", lambda found: ports[found.group()], text))
    stranger.interrupts()
    assert stranger.runs("python -c 'import nnburst; print(nnburst.__file__)'").startswith(f"{HOME}/env/")
