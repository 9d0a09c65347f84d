"""Where shared services are found: names, locks, sockets that were left behind, who is at the other end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner

from nnburst.cli import main
from nnburst.cli.serve import children
from nnburst.errors import BadState, DeviceUnavailable, InvalidArgument, MissedDeadline
from nnburst.service.process import discovery as rendezvous
from nnburst.service.process.discovery import (
    Claim,
    claim,
    dial,
    listen_at,
    owner_of,
    peer_of,
    peer_pidfd,
    running_services,
)
from support.waiting import PATIENCE, meanwhile


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    directory = tmp_path / "run"
    monkeypatch.setenv("NNBURST_RUNTIME_DIR", str(directory))
    monkeypatch.setattr(rendezvous, "SYSTEM_DIRECTORY", tmp_path / "system")
    return directory


def test_directory_and_socket_are_for_this_user_alone_whatever_the_umask(runtime: Path) -> None:
    before = os.umask(0)
    try:
        claimed = claim("vision")
    finally:
        os.umask(before)
    with contextlib.closing(claimed):
        assert [stat.S_IMODE(path.stat().st_mode) for path in (runtime, claimed.path)] == [0o700, 0o600]


def test_wider_claim_lets_others_reach_the_socket_but_not_list_the_directory(runtime: Path) -> None:
    with contextlib.closing(claim("vision", wider=True)) as claimed:
        assert [stat.S_IMODE(path.stat().st_mode) for path in (runtime, claimed.path)] == [0o711, 0o666]


def test_second_owner_is_refused_with_the_pid_of_the_first() -> None:
    with contextlib.closing(claim("vision")):
        with pytest.raises(BadState, match=f"process {os.getpid()} already: nnburst stop vision ends it"):
            claim("vision")
        dial("vision", 1.0).close()  # the first one goes on listening


def test_close_removes_socket_and_lock_and_frees_the_name(runtime: Path) -> None:
    for _ in range(2):
        claimed = claim("vision")
        claimed.close()
        claimed.close()
        assert list(runtime.iterdir()) == []


def _killed_owner(name: str) -> int:
    """Have a process claim a name and die by SIGKILL while it owns it."""
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            claim(name)
            os.write(told, b"x")
            signal.pause()
        finally:
            os._exit(1)
    os.close(told)
    assert os.read(ready, 1) == b"x"
    os.close(ready)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return pid


def test_socket_of_a_killed_owner_is_listed_as_dead_explained_and_taken_over(runtime: Path) -> None:
    _killed_owner("vision")
    assert {path.name for path in runtime.iterdir()} == {"vision.sock", "vision.lock"}
    assert [(found.name, found.pid) for found in running_services()] == [("vision", 0)]
    with pytest.raises(DeviceUnavailable, match="start one with: nnburst serve"):
        dial("vision", 1.0)
    with contextlib.closing(claim("vision")):
        assert [(found.name, found.pid) for found in running_services()] == [("vision", os.getpid())]
        dial("vision", 1.0).close()
        with pytest.raises(DeviceUnavailable, match=r"visoin\.sock': the services here are vision$"):
            dial("visoin", 1.0)


def test_socket_of_a_service_manager_is_not_listed_as_dead(runtime: Path) -> None:
    runtime.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(runtime / "vision.sock"))
        assert [(found.name, found.pid) for found in running_services()] == [("vision", None)]
    assert "see its service manager" in CliRunner().invoke(main, ["ls"]).output
    (row,) = json.loads(CliRunner().invoke(main, ["ls", "--json"]).output)
    assert (row["pid"], row["running"]) == (None, None)
    assert owner_of("vision") == 0


def test_many_that_claim_at_once_after_a_kill_one_wins() -> None:
    _killed_owner("vision")
    barrier = threading.Barrier(8)

    def run(_: int) -> Claim | None:
        barrier.wait(PATIENCE)
        with contextlib.suppress(BadState):
            return claim("vision")
        return None

    with ThreadPoolExecutor(8) as threads:
        (won,) = filter(None, threads.map(run, range(8)))
    with contextlib.closing(won):
        dial("vision", 1.0).close()


def test_listing_does_not_disturb_a_claim() -> None:
    """The owner of a name is asked for without taking its lock, so a start at that moment is not refused."""
    with meanwhile(lambda: list(running_services())):
        for _ in range(200):
            claim("vision").close()


def test_name_whose_lock_file_was_removed_is_still_the_first_owners(runtime: Path) -> None:
    with contextlib.closing(claim("vision")) as claimed:
        claimed.write("closed in")
        (runtime / "vision.lock").unlink()
        (found,) = running_services()
        assert (found.name, found.pid, found.sandbox) == ("vision", os.getpid(), "closed in")
        assert owner_of("vision") == os.getpid()
        with pytest.raises(BadState, match=f"process {os.getpid()} listens at .*vision.sock"):
            claim("vision")
        dial("vision", 1.0).close()  # the first one goes on listening
    assert list(runtime.iterdir()) == []


def test_name_whose_socket_was_removed_is_told_to_all_who_ask(runtime: Path) -> None:
    with contextlib.closing(claim("vision")):
        (runtime / "vision.sock").unlink()
        with pytest.raises(BadState, match=f"process {os.getpid()} already"):
            claim("vision")
        with pytest.raises(DeviceUnavailable, match=f"process {os.getpid()} serves 'vision', but .* was removed"):
            dial("vision", 1.0)
        for command, said in (("stop vision", f"process {os.getpid()} serves 'vision', but"), ("ls", "was removed")):
            assert said in CliRunner().invoke(main, command.split()).output


def test_owner_removes_none_of_its_successors_files(runtime: Path) -> None:
    first = claim("vision")
    for file in runtime.iterdir():
        file.unlink()
    with contextlib.closing(claim("vision")):
        first.close()
        assert {path.name for path in runtime.iterdir()} == {"vision.sock", "vision.lock"}
        dial("vision", 1.0).close()
    assert list(runtime.iterdir()) == []


def test_lock_file_that_a_dead_owner_left_alone_is_no_service(runtime: Path) -> None:
    _killed_owner("vision")
    (runtime / "vision.sock").unlink()
    assert list(running_services()) == []
    with pytest.raises(DeviceUnavailable, match="no service runs"):
        dial("vision", 1.0)


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def test_place_where_another_program_listens_is_not_taken(tmp_path: Path, kind: int) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, kind) as other:
        other.bind(str(path))
        other.listen(0)
        for take in (claim, lambda address: listen_at(Path(address.removeprefix("unix:")))):  # then its backlog is full
            with pytest.raises(BadState, match="listens at"):
                take(f"unix:{path}")
        assert [file.name for file in tmp_path.iterdir()] == ["s"]


@pytest.mark.parametrize("is_replaced", [False, True])
def test_socket_of_a_child_is_removed_unless_another_listens_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_replaced: bool
) -> None:
    path = tmp_path / "s"
    speaks = "import json, sys; print(json.dumps(json.loads(sys.argv[1])), flush=True); sys.stdin.read()"
    monkeypatch.setattr(children, "safe_command", lambda module: [sys.executable, "-c", speaks])
    with contextlib.ExitStack() as ending:
        child = children.Child("the gateway", "--oip", {"rest": f"unix:{path}"})
        ending.enter_context(listen_at(path)) if is_replaced else listen_at(path).close()
        child.close()
        assert path.exists() == is_replaced


def test_gateway_does_not_take_the_socket_of_another() -> None:
    with contextlib.closing(claim("vision")) as claimed, pytest.raises(BadState, match="listens at"):
        children.gateway(True, {"grpc": None, "rest": f"unix:{claimed.path}", "token_file": None})


@pytest.mark.parametrize("address", ["", "a/b", "../x", ".hidden", "x" * 65, "a b", "a\0b"])
def test_malformed_name_is_refused(address: str) -> None:
    with pytest.raises(InvalidArgument, match="name of a service"):
        claim(address)
    with pytest.raises(InvalidArgument, match="name of a service"):
        dial(address, 1.0)


def test_path_that_is_too_long_for_a_socket_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="longer than 107 bytes"):
        claim(f"unix:{tmp_path}/{'x' * 100}.sock")


def test_file_that_is_no_socket_is_not_replaced(tmp_path: Path) -> None:
    file = tmp_path / "precious"
    file.write_text("kept")
    with pytest.raises(InvalidArgument, match="is not a socket"):
        claim(f"unix:{file}")
    assert file.read_text() == "kept"
    assert not (tmp_path / "precious.lock").exists()


@pytest.mark.parametrize("kind", ["link", "writable", "file"])
def test_runtime_directory_that_others_could_change_is_refused(runtime: Path, tmp_path: Path, kind: str) -> None:
    if kind == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        runtime.symlink_to(tmp_path / "elsewhere")
    elif kind == "file":
        runtime.write_text("")
    else:
        runtime.mkdir()
        runtime.chmod(0o777)
    with pytest.raises(BadState, match="runtime directory"):
        claim("vision")


@pytest.mark.parametrize("kind", ["link", "writable"])
def test_name_in_a_directory_that_others_could_change_is_not_connected_to(
    monkeypatch: pytest.MonkeyPatch, runtime: Path, tmp_path: Path, kind: str
) -> None:
    with contextlib.closing(claim("vision")) as claimed:
        if kind == "link":
            planted = tmp_path / "planted"
            planted.symlink_to(runtime)
            monkeypatch.setenv("NNBURST_RUNTIME_DIR", str(planted))
        else:
            runtime.chmod(0o777)
        with pytest.raises(DeviceUnavailable, match=r"the runtime directory .*\([dl]rwxrwxrwx\)"):
            dial("vision", 1.0)
        assert list(running_services()) == []
        dial(f"unix:{claimed.path}", 1.0).close()  # a path is what its writer makes it


@pytest.mark.parametrize("trust", ["root", True, 1.5, [0, "x"], None])
def test_users_to_trust_are_ids(trust: object) -> None:
    with pytest.raises(InvalidArgument, match=r"trust_uid=.*user id"):
        dial("vision", 1.0, trust)  # type: ignore[arg-type]


def test_lock_file_of_a_dead_owner_names_the_new_one_alone(runtime: Path) -> None:
    runtime.mkdir(0o700)
    lock = runtime / "vision.lock"
    lock.write_text("4194304999\nand more\n")
    with contextlib.closing(claim("vision")):
        assert lock.read_text() == f"{os.getpid()}\n"


def test_lock_file_that_is_a_link_is_not_followed(runtime: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("kept")
    runtime.mkdir(mode=0o700)
    (runtime / "vision.lock").symlink_to(victim)
    with pytest.raises(BadState, match="lock file"):
        claim("vision")
    assert victim.read_text() == "kept"


@pytest.mark.parametrize("kind", ["fifo", "socket", "directory"])
def test_lock_file_of_another_kind_is_neither_waited_for_nor_used(runtime: Path, kind: str) -> None:
    claim("vision").close()  # makes the directory
    lock, place = runtime / "vision.lock", runtime / "vision.sock"
    if kind == "fifo":
        os.mkfifo(lock)
    elif kind == "directory":
        lock.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(lock))
    with pytest.raises(BadState, match=r"the lock file '.*vision.lock' cannot be used"):
        claim("vision")
    place.touch()
    assert [(found.name, found.pid) for found in running_services()] == [("vision", 0)]
    assert owner_of("vision") == 0


def test_name_is_looked_for_in_the_directory_of_the_system_second(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runtime: Path
) -> None:
    monkeypatch.setenv("NNBURST_RUNTIME_DIR", str(tmp_path / "system"))
    with contextlib.closing(claim("vision")):
        monkeypatch.setenv("NNBURST_RUNTIME_DIR", str(runtime))
        dial("vision", 1.0).close()
        assert [(found.name, found.path.parent.name) for found in running_services()] == [("vision", "system")]
        assert owner_of("vision") == os.getpid()


def test_nothing_there_says_how_to_start_it() -> None:
    with pytest.raises(DeviceUnavailable, match=r"nnburst serve --name vision"):
        dial("vision", 1.0)


def test_socket_of_another_kind_is_refused(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(tmp_path / "other.sock"))
        other.listen()
        with pytest.raises(DeviceUnavailable, match="cannot be reached"):
            dial(f"unix:{tmp_path}/other.sock", 1.0)


def test_service_that_takes_no_connections_is_a_missed_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_BACKLOG", 0)
    with contextlib.ExitStack() as opened:
        opened.enter_context(contextlib.closing(claim("vision")))
        with pytest.raises(MissedDeadline, match="took no connection within"):
            for _ in range(8):
                opened.enter_context(dial("vision", 0.2))


def test_peer_is_what_the_kernel_says() -> None:
    with contextlib.closing(claim("vision")) as claimed, dial("vision", 1.0) as client:
        server, _ = claimed.listener.accept()
        with server:
            for end in (client, server):
                peer = peer_of(end)
                assert (peer.pid, peer.uid) == (os.getpid(), os.geteuid())
                assert peer.groups >= {os.getegid()}
                pidfd = peer_pidfd(end)
                assert pidfd is not None
                os.close(pidfd)
