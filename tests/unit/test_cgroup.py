"""Groups of workers: what is read from the kernel's files, and written to them, on a tree of plain files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nnburst.service.host.quotas import PER_USER
from nnburst.service.process.cgroup import Groups, own_groups

MOUNT = "41 31 0:38 {root} {place} rw,relatime shared:9 - cgroup2 cgroup2 rw\n"
V1 = "36 31 0:33 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


class Tree:
    """A hierarchy with the group of a service, as it is started."""

    def __init__(self, tmp_path: Path, *, path: str = "/system.slice/it.service", root: str = "/") -> None:
        self.place, self.own = tmp_path / "unified", tmp_path / "self"
        self.group = self.place / path.removeprefix(root).lstrip("/")
        self.group.mkdir(parents=True)
        self.own.mkdir()
        (self.own / "cgroup").write_text(f"4:memory:/elsewhere\n0::{path}\n")
        (self.own / "mountinfo").write_text(V1 + MOUNT.format(root=root, place=self.place))
        for name, text in {
            "cgroup.events": "populated 1\n",
            "cgroup.procs": f"{os.getpid()}\n",
            "cgroup.controllers": "cpuset cpu memory pids\n",
            "cgroup.subtree_control": "",
        }.items():
            (self.group / name).write_text(text)

    def written(self, group: str) -> dict[str, str]:
        return {file.name: file.read_text() for file in (self.group / group).iterdir()}


@pytest.fixture
def as_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


@pytest.fixture
def groups(tmp_path: Path) -> Groups:
    return Groups(tmp_path, frozenset(("cpu", "memory", "pids")))


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(("path", "root"), [("/system.slice/it.service", "/"), ("/box/it", "/box"), ("/", "/")])
def test_service_moves_into_a_group_beside_those_of_its_workers(tmp_path: Path, path: str, root: str) -> None:
    tree = Tree(tmp_path, path=path, root=root)
    groups = own_groups(tree.own)
    assert str(groups).startswith(f"{tree.group} ")
    assert tree.written("broker") == {"cgroup.procs": str(os.getpid())}
    assert (tree.group / "cgroup.subtree_control").read_text() in {"+cpu", "+memory", "+pids"}


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("cgroup.procs", f"1\n{os.getpid()}\n"),
        ("cgroup.procs", f"0\n{os.getpid()}\n"),
        ("cgroup.events", None),
        ("cgroup.subtree_control", None),
    ],
    ids=["another process", "one of another namespace", "the machine's root", "not to be written"],
)
def test_group_that_is_not_the_services_alone_is_left_as_it_is(tmp_path: Path, file: str, text: str | None) -> None:
    tree = Tree(tmp_path)
    (tree.group / file).unlink()
    if text is not None:
        (tree.group / file).write_text(text)
    assert own_groups(tree.own) is None
    assert not (tree.group / "broker").exists()


@pytest.mark.parametrize("mark", [None, b"0", b"1"])
def test_group_that_root_may_write_is_used_if_it_is_delegated(
    tmp_path: Path, mark: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    tree = Tree(tmp_path)

    def mark_of(path: Path, name: str) -> bytes:
        if mark is None or (path, name) != (tree.group, "trusted.delegate"):
            raise OSError
        return mark

    monkeypatch.setattr(os, "getxattr", mark_of)
    assert (own_groups(tree.own) is not None) is (mark == b"1")


@pytest.mark.parametrize("text", ["4:memory:/elsewhere\n", "0::/elsewhere/it (deleted)\n", ""])
def test_machine_without_groups_has_none(tmp_path: Path, text: str) -> None:
    tree = Tree(tmp_path)
    (tree.own / "cgroup").write_text(text)
    (tree.own / "mountinfo").write_text(V1)
    assert own_groups(tree.own) is None


def test_limits_of_a_group_are_the_quotas_of_its_user(groups: Groups, tmp_path: Path) -> None:
    (tmp_path / "user-7").mkdir()
    (tmp_path / "user-7" / "memory.swap.max").write_text("max")
    processors = (os.cpu_count() or 1) - 1
    quotas = {"process_bytes": 1 << 30, "process_threads": 50, "processors": processors}
    group = groups.add_worker(12, 7, PER_USER.replace(quotas, of_user=True))
    assert group is not None
    assert {file.name: file.read_text() for file in (tmp_path / "user-7").iterdir()} == {
        "memory.max": "1073741824",
        "memory.swap.max": "0",
        "pids.max": "50",
        "cpu.weight.nice": "5",
        "cpu.max": f"{100_000 * max(processors, 1)} 100000" if processors else "100000 100000",
        "cgroup.procs": "12",
    }
    groups.add_worker(13, 8, PER_USER)
    assert (tmp_path / "user-8" / "memory.max").read_text() == "max"
    assert (tmp_path / "user-8" / "cpu.max").read_text() == "max 100000"
    groups.add_worker(14, None, PER_USER)
    assert [file.name for file in (tmp_path / "named").iterdir()] == ["cgroup.procs"]


def test_controller_that_the_groups_lack_is_not_used(tmp_path: Path) -> None:
    group = Groups(tmp_path, frozenset(("pids",))).add_worker(12, 7, PER_USER)
    assert group is not None
    assert group.held == {"pids"}
    assert {file.name for file in (tmp_path / "user-7").iterdir()} == {"pids.max", "cgroup.procs"}


def test_worker_that_the_kernel_ends_for_want_of_memory_is_told_from_others(groups: Groups, tmp_path: Path) -> None:
    group = groups.add_worker(12, 7, PER_USER)
    assert group is not None
    events = tmp_path / "user-7" / "memory.events"
    said = []
    for text in ("oom 0\noom_kill 0\n", "oom 3\noom_kill 1\n", "oom 3\noom_kill 1\n", "oom 3\noom_kill 2\n"):
        events.write_text(text)
        said.append(group.why_killed())
    assert said[0] == said[2] == ""
    assert "--quota user.process_bytes=N" in said[1]
    assert "process_bytes" not in said[3]
    assert "is short of memory" in said[3]


def test_group_is_removed_once_its_workers_have_ended(
    groups: Groups, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = groups.add_worker(12, 7, PER_USER)
    assert group is not None
    assert not groups.sweep({group})
    assert groups.sweep({None}), "it has files here, as one whose process is still there"
    for file in (tmp_path / "user-7").iterdir():
        file.unlink()
    assert not groups.sweep({None})
    assert not (tmp_path / "user-7").exists()


def test_worker_whose_group_is_refused_is_counted_by_the_service(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "user-7").write_text("in the way")
    assert Groups(tmp_path, frozenset()).add_worker(12, 7, PER_USER) is None
    assert "process 12 is not in the group" in caplog.text
