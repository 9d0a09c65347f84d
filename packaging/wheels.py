"""Build the sdist, and from it one wheel for each platform. See `make wheels`.

Zig compiles for every platform, against the oldest C library that the wheel's name promises; patchelf corrects the
name of musl's library. auditwheel checks that each wheel matches its name. abi3audit checks that the wheel uses only
the stable ABI. twine checks that a registry accepts the wheel and its page. The same sources give the same bytes: the
times come from the last commit (or `SOURCE_DATE_EPOCH`), and paths are left out.

    python packaging/wheels.py --out dist
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTENSION = "nnburst/_core/_nnburst.abi3.so"


@dataclass(frozen=True)
class Platform:
    """A wheel's platform: Zig's target, and the tag of the wheel."""

    arch: str
    zig: str
    tag: str

    @property
    def is_musl(self) -> bool:
        """True if the C library is musl."""
        return self.tag.startswith("musllinux")


PLATFORMS = tuple(
    Platform(arch, f"{arch}-linux-{libc}", f"{tag}_{arch}")
    for arch in ("x86_64", "aarch64")
    for libc, tag in (("gnu.2.17", "manylinux_2_17"), ("musl", "musllinux_1_2"))
)


def run(*command: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    """Run a command and return its output. A failure ends the program."""
    done = subprocess.run(
        [str(part) for part in command], env=env, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        sys.exit(f"wheels: {' '.join(str(part) for part in command)}: exit status {done.returncode}\n{done.stdout}")
    return done.stdout


def tool(name: str) -> Path:
    """Return the path of a program in this Python environment."""
    return Path(sys.executable).with_name(name)


def epoch() -> str:
    """Return the time stamp for all files, in seconds since the epoch."""
    return os.environ.get("SOURCE_DATE_EPOCH") or run("git", "-C", ROOT, "log", "-1", "--format=%ct").strip()


def build(kind: str, source: Path, out: Path, env: dict[str, str]) -> Path:
    """Build the sdist or a wheel from `source` and return the file's path."""
    out.mkdir(parents=True)
    run(sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", out, source, env=env)
    (file,) = out.iterdir()
    return file


def build_sdist(work: Path, env: dict[str, str]) -> Path:
    """Build the sdist from the commit that is checked out, without changed or untracked files."""
    tree = work / "tree"
    run("git", "clone", "--quiet", "--no-hardlinks", ROOT, tree)
    file = build("sdist", tree, work / "sdist", env)
    again = work / file.name
    with tarfile.open(file) as old, tarfile.open(again.with_suffix(""), "w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = (
                int(env["SOURCE_DATE_EPOCH"]),
                0,
                0,
                "",
                "",
            )
            member.mode, member.pax_headers = 0o755 if member.mode & 0o100 else 0o644, {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    run("gzip", "--no-name", "-9", again.with_suffix(""))
    return again


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpack the sdist with `tar`, as older Pythons have no safe extraction, and return its tree."""
    folder.mkdir(parents=True, exist_ok=True)
    run("tar", "--extract", "--gzip", "--no-same-owner", f"--file={sdist}", f"--directory={folder}")
    return folder / sdist.name.removesuffix(".tar.gz")


def multiarch_headers(arch: str, folder: Path) -> Path:
    """Return an include folder for an architecture. If Python is Debian's, the folder has a copy of ``pyconfig.h``.

    The original is in a folder with headers of this machine's C library, which a cross compiler must not read. The
    copy is right for every 64-bit architecture, since they do not differ in the limited API.
    """
    usual = Path(sysconfig.get_path("include"))
    own = usual.parent / str(sysconfig.get_config_var("MULTIARCH")) / usual.name / "pyconfig.h"
    place = folder / f"{arch}-linux-gnu" / usual.name
    place.mkdir(parents=True)
    if own.exists():
        shutil.copy(own, place)
    return folder


def build_wheel(platform: Platform, sdist: Path, work: Path, env: dict[str, str]) -> Path:
    """Build one wheel from the sdist, and check that it matches its name."""
    work /= platform.tag
    source = unpack(sdist, work)
    cc = f"{sys.executable} -m ziglang cc -target {platform.zig} -g0 -ffile-prefix-map={source}=."
    env = env | {
        "CC": cc,
        "LDSHARED": f"{cc} -shared -s",
        "CFLAGS": f"-g0 -I{multiarch_headers(platform.arch, work / 'include')}",
        "_PYTHON_HOST_PLATFORM": f"linux-{platform.arch}",
        "ZIG_GLOBAL_CACHE_DIR": str(work / "zig"),
        "ZIG_LOCAL_CACHE_DIR": str(work / "zig"),
    }
    wheel = build("wheel", source, work / "built", env)
    if platform.is_musl:
        run(tool("wheel"), "unpack", wheel, "--dest", work / "unpacked")
        (root,) = (work / "unpacked").iterdir()
        libc = f"libc.musl-{platform.arch}.so.1"
        run(tool("patchelf"), "--replace-needed", "libc.so", libc, root / EXTENSION)
        wheel.unlink()
        run(tool("wheel"), "pack", root, "--dest-dir", wheel.parent, env=env)
    run(tool("wheel"), "tags", "--remove", "--platform-tag", platform.tag, wheel, env=env)
    (wheel,) = wheel.parent.iterdir()
    said = run(tool("auditwheel"), "show", wheel)
    found = re.search(r'platform tag: "([^"]+)"', " ".join(said.split()))
    if not found or found.group(1) != platform.tag:
        sys.exit(f"wheels: {wheel.name} is not what its name says:\n{said}")
    run(tool("abi3audit"), "--strict", wheel)
    return wheel


def build_sbom(work: Path, env: dict[str, str]) -> Path:
    """Write a CycloneDX list of this package and its current dependencies, with versions."""
    file, home = work / "nnburst.cdx.json", work / "installation"
    python = home / "bin" / "python"
    run(sys.executable, "-m", "venv", "--without-pip", home)
    shown = "import tomllib, sys; print(*tomllib.load(open(sys.argv[1], 'rb'))['project']['dependencies'], sep='\\n')"
    wanted = run(sys.executable, "-c", shown, ROOT / "pyproject.toml").splitlines()
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *wanted)
    run(
        *(tool("cyclonedx-py"), "environment", python, "--pyproject", ROOT / "pyproject.toml"),
        *("--output-reproducible", "--mc-type", "library", "--output-file", file),
        env=env,
    )
    parts = json.loads(file.read_text())
    parts["metadata"]["component"]["version"] = runpy.run_path(str(ROOT / "nnburst" / "_version.py"))["VERSION"]
    file.write_text(json.dumps(parts, indent=2, sort_keys=True) + "\n")
    return file


def main() -> None:
    """Build everything into the given folder. A failure leaves the folder unchanged."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--only", metavar="TAG", help="only platforms whose tag contains this")
    options = parser.parse_args()
    env = os.environ | {"SOURCE_DATE_EPOCH": epoch()}
    with tempfile.TemporaryDirectory(prefix="nnburst-wheels-") as folder:
        work = Path(folder)
        sdist = build_sdist(work, env)
        chosen = [platform for platform in PLATFORMS if (options.only or "") in platform.tag]
        files = [sdist, *(build_wheel(platform, sdist, work, env) for platform in chosen)]
        run(tool("twine"), "check", "--strict", *files)
        files.append(build_sbom(work, env))
        options.out.mkdir(parents=True, exist_ok=True)
        for file in files:
            shutil.copyfile(file, options.out / file.name)
            print(options.out / file.name)


if __name__ == "__main__":
    main()
