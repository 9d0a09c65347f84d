"""Discovery of shared services by name: a socket and a lock file in the runtime directory.

The owner of a name has an open-file lock on ``NAME.lock``, which the kernel releases when the process ends. If the
lock is free and no process listens at the socket, a new owner may replace both files.

Another program may remove the files of a running service. The service still listens, and removes only its own files
when it ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import re
import socket
import stat
import struct
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from msgspec import Struct

from ..._core.deadline import Deadline
from ..._core.errno import meaning
from ...errors import BadState, DeviceUnavailable, InvalidArgument, MissedDeadline, NNBurstError, ResourceExhausted

RUNTIME_VARIABLE = "NNBURST_RUNTIME_DIR"
SYSTEM_DIRECTORY = Path("/run/nnburst")
"""The directory of the system's services, searched after the user's own directory."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PREFIX = "unix:"
_LONGEST_PATH = 107  # bytes of sockaddr_un.sun_path without the terminating zero
_BACKLOG = 64
_RETRY = 0.005
_LONGEST_LOCK = 4096
_SO_PEERGROUPS = 59
_LONGEST_OPTION = 1024
"""Maximum size in bytes of a socket option that Python can read."""
_SO_PEERPIDFD = 77  # Linux has it from version 6.5 on
_FLOCK = struct.Struct("hhqqi4x")  # struct flock with a 64-bit off_t
_WHOLE_FILE = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


# ---- names ----------------------------------------------------------------------------------------------------


def runtime_directory() -> Path:
    """Return the directory of this user's sockets: ``NNBURST_RUNTIME_DIR``, or one in ``XDG_RUNTIME_DIR`` or /tmp."""
    chosen = os.environ.get(RUNTIME_VARIABLE)
    if chosen:
        return Path(chosen)
    session = os.environ.get("XDG_RUNTIME_DIR")
    return Path(session, "nnburst") if session else Path(f"/tmp/nnburst-{os.geteuid()}")


def socket_path(address: str) -> Path:
    """Return the path of a service's socket.

    Args:
        address: A name of letters, digits, ``.``, ``_`` and ``-``, or ``unix:`` and a path.

    Raises:
        InvalidArgument: The address is malformed, or the path is too long for a socket.
    """
    if not isinstance(address, str):
        raise InvalidArgument(f"expected the name of a service or 'unix:PATH', got {type(address).__name__}")
    if address.startswith(_PREFIX):
        path = Path(address.removeprefix(_PREFIX)).absolute()
        if path.is_dir():  # an empty path is the working directory
            raise InvalidArgument(f"{address!r} is a directory: give 'unix:' and the path of a socket")
    elif _NAME.fullmatch(address):
        path = runtime_directory() / f"{address}.sock"
    else:
        raise InvalidArgument(
            f"{address!r} is not the name of a service: use letters, digits, '.', '_' and '-', or give 'unix:PATH'"
        )
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise InvalidArgument(
            f"the path of the socket, {str(path)!r}, is longer than {_LONGEST_PATH} bytes: set {RUNTIME_VARIABLE} to a "
            f"shorter directory, or give 'unix:PATH'"
        )
    return path


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(".sock") + ".lock")


def _own_directory(directory: Path, wider: bool) -> None:
    """Create the runtime directory, or refuse one that another user could change.

    Args:
        directory: The directory, created with mode 0700.
        wider: True to let other users open paths in the directory, but not list it.

    Raises:
        BadState: The directory is a link, belongs to another user, or can be written by other users.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        raise BadState(f"the runtime directory {str(directory)!r} cannot be used: {error.strerror}") from error
    if not _belongs_to(found, {os.geteuid()}):
        raise BadState(
            f"the runtime directory {str(directory)!r} must be a directory of user {os.geteuid()} that no other user "
            f"can write: remove it, or set {RUNTIME_VARIABLE}"
        )
    if wider and found.st_mode & 0o011 != 0o011:
        directory.chmod(stat.S_IMODE(found.st_mode) | 0o011)


def _belongs_to(found: os.stat_result, uids: Collection[int]) -> bool:
    """Return True for a directory (no link) that belongs to one of the users and that only its owner can write."""
    return stat.S_ISDIR(found.st_mode) and found.st_uid in uids and not found.st_mode & 0o022


def trusted_uids(more: int | Collection[int] = ()) -> frozenset[int]:
    """Return this process's user, root, and `more`. Raises `InvalidArgument` unless `more` contains only user ids."""
    uids = more if isinstance(more, Collection) else (more,)
    if isinstance(more, str | bytes) or not all(isinstance(uid, int) and not isinstance(uid, bool) for uid in uids):
        raise InvalidArgument(f"trust_uid={more!r}: give a user id, or several; pwd.getpwnam(NAME).pw_uid is one")
    return frozenset({os.geteuid(), 0, *uids})


def _why_distrusted(directory: Path, trusted: Collection[int]) -> str:
    """Return a sentence if an untrusted user owns or can write a runtime directory, else ""."""
    try:
        found = directory.lstat()
    except OSError:
        return ""
    if _belongs_to(found, trusted):
        return ""
    return (
        f"the runtime directory {str(directory)!r} is of user {found.st_uid} ({stat.filemode(found.st_mode)}), so a "
        f"service in it may be anybody's: remove it, set {RUNTIME_VARIABLE}, or, if no other user can write it and you "
        f"trust that one, connect(..., trust_uid={found.st_uid})"
    )


# ---- serving --------------------------------------------------------------------------------------------------


class Claim:
    """A service's name that this process owns, and the listening socket. `close` releases both."""

    def __init__(self, path: Path, listener: socket.socket, lock: int) -> None:
        self.path = path
        self.listener = listener
        self._lock = lock
        self._own = (path, path.lstat()), (_lock_path(path), os.fstat(lock))

    def close(self) -> None:
        """Remove the files, stop listening and release the name. Idempotent."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            for path, own in self._own:
                with contextlib.suppress(OSError):
                    if os.path.samestat(path.lstat(), own):  # our file is open, so no other file has its inode
                        path.unlink()
            self.listener.close()
            os.close(lock)

    def write(self, text: str) -> None:
        """Write a line about the service into the lock file. `running_services` reads this line."""
        os.pwrite(self._lock, f"{os.getpid()}\n{text}\n".encode()[:_LONGEST_LOCK], 0)


def claim(address: str, *, wider: bool = False) -> Claim:
    """Take a service's name and listen at its socket. The socket of a dead service is replaced.

    Args:
        address: See `socket_path`.
        wider: True if users other than this one may reach the socket.

    Raises:
        BadState: Another process owns the name (the message has its pid), or the path cannot be used.
        InvalidArgument: The address is malformed, or the path is taken by a file that is not a socket.
    """
    path = socket_path(address)
    if not address.startswith(_PREFIX):
        _own_directory(path.parent, wider)
    lock = _take_lock(_lock_path(path), address)
    try:
        return Claim(path, listen_at(path, wider=wider, kind=socket.SOCK_SEQPACKET), lock)
    except BaseException:
        with contextlib.suppress(OSError):
            _lock_path(path).unlink()
        os.close(lock)
        raise


def _take_lock(path: Path, address: str) -> int:
    while True:
        try:
            fd = _open_lock(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise BadState(f"the lock file {str(path)!r} cannot be used: {error.strerror}") from error
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _WHOLE_FILE)
        except (BlockingIOError, PermissionError):
            pid, _ = _read(fd)
            os.close(fd)
            raise BadState(
                f"{address!r} is served by {_named(pid)} already: nnburst stop {address} ends it; or take another name"
            ) from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(path.lstat(), os.fstat(fd)):
                os.ftruncate(fd, 0)
                os.pwrite(fd, b"%d\n" % os.getpid(), 0)
                return fd
        os.close(fd)  # the previous owner removed the file between our open and our lock


def _named(pid: int) -> str:
    return f"process {pid}" if pid else "another process"


def _open_lock(path: Path, flags: int) -> int:
    """Open a lock file without waiting, even if a pipe or device has its name.

    Raises:
        OSError: The file cannot be opened, or is not a regular file.
    """
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file; remove it, or choose another name")
    return fd


def _open_removed(path: Path) -> int:
    """Open a removed lock file that a process of this user still has open.

    Raises:
        FileNotFoundError: No process of this user has the file open.
    """
    removed = f"{os.path.realpath(path)} (deleted)"
    for link in glob.iglob("/proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(link) == removed and os.stat(link).st_uid == os.geteuid():
                return os.open(link, os.O_RDONLY | os.O_CLOEXEC)
    raise FileNotFoundError(path)


def _read(fd: int) -> tuple[int, str]:
    """Return the contents of a lock file: the pid of the service, and a line that describes its sandbox."""
    pid, _, text = os.pread(fd, _LONGEST_LOCK, 0).decode(errors="replace").partition("\n")
    return (int(pid), "".join(filter(str.isprintable, text))) if pid.isascii() and pid.isdigit() else (0, "")


def check_free(path: Path) -> None:
    """Raise `BadState` if a process listens at a Unix socket, even one without a lock file."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as probe:
        error = probe.connect_ex(os.fspath(path))
        if error in (0, errno.EAGAIN, errno.EPROTOTYPE):  # a listener exists, perhaps full or of another type
            owner = _named(0 if error else peer_of(probe).pid)
            raise BadState(f"{owner} listens at {str(path)!r} already: stop that one, or choose another place")


def listen_at(path: Path, *, wider: bool = False, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """Listen at a Unix socket. A socket file without a listener is replaced.

    Args:
        path: Path of the socket.
        wider: True if other users may connect.
        kind: Type of the socket.

    Raises:
        BadState: Another process listens there.
        InvalidArgument: The path is taken by a file that is not a socket.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise InvalidArgument(f"{str(path)!r} exists and is not a socket: choose another path")
    check_free(path)
    listener = socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC)
    try:
        path.unlink(missing_ok=True)
        os.fchmod(listener.fileno(), 0o600)  # bind creates the file with this mode, whatever the umask
        listener.bind(os.fspath(path))
        if wider:
            path.chmod(0o666)
        listener.listen(_BACKLOG)
        return listener
    except OSError as error:
        listener.close()
        raise BadState(f"the service cannot listen at {str(path)!r}: {error.strerror}") from error


# ---- connecting -----------------------------------------------------------------------------------------------


class Peer(Struct, frozen=True):
    """The process that made the other end of a connected socket, as the kernel reports it.

    Attributes:
        pid: Process id; 0 if the process is not in this process's pid namespace.
        uid: User id.
        groups: Ids of the process's group and supplementary groups.
    """

    pid: int
    uid: int
    groups: frozenset[int]

    def __str__(self) -> str:
        return f"process {self.pid} of user {self.uid}"


def peer_of(sock: socket.socket) -> Peer:
    pid, uid, gid = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII")))
    try:
        packed = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _LONGEST_OPTION)
    except OSError:  # the groups are too many to read: only the first counts
        packed = b""
    return Peer(pid, uid, frozenset({gid, *struct.unpack(f"{len(packed) // 4}I", packed)}))


def peer_pidfd(sock: socket.socket) -> int | None:
    """Return a pidfd of the peer's process; None if the kernel does not know the process."""
    with contextlib.suppress(OSError):
        return int(sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
    pid = peer_of(sock).pid
    with contextlib.suppress(OSError):
        return os.pidfd_open(pid) if pid > 0 else None
    return None


def _find(address: str, trusted: Collection[int]) -> Path:
    """Return the path of a service's socket in this user's directory or, if it is not there, in the system's directory.

    Raises:
        DeviceUnavailable: An untrusted user may have put files into the directory.
    """
    path = socket_path(address)
    if address.startswith(_PREFIX):
        return path
    shared, why = SYSTEM_DIRECTORY / path.name, _why_distrusted(path.parent, trusted)
    if (why or not os.path.exists(path)) and os.path.exists(shared):
        path, why = shared, _why_distrusted(SYSTEM_DIRECTORY, trusted)
    if why:
        raise DeviceUnavailable(why)
    return path


def _check_peer(sock: socket.socket, path: Path, trusted: Collection[int]) -> None:
    uid = peer_of(sock).uid
    if uid not in trusted:
        raise DeviceUnavailable(
            f"the service at {str(path)!r} is of user {uid}, and this process trusts those of user {os.geteuid()} and "
            f"of root: if you trust that user with what models get and give, connect(..., trust_uid={uid})"
        )


def dial(address: str, timeout: float | None, trust_uid: int | Collection[int] = ()) -> socket.socket:
    """Connect to a running service.

    Args:
        address: See `socket_path`. A name is searched in the user's directory, then in /run/nnburst.
        timeout: Seconds to wait for room in the service's backlog; None for no limit.
        trust_uid: See `connect_to`.

    Raises:
        DeviceUnavailable, InvalidArgument: See `connect_to`.
        MissedDeadline: The service did not accept the connection in time.
    """
    trusted = trusted_uids(trust_uid)
    path = _find(address, trusted)
    deadline = Deadline.after(timeout)
    limit = deadline.left()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        while True:
            try:
                sock.connect(os.fspath(path))
                _check_peer(sock, path, trusted)
                return sock
            except BlockingIOError:  # the backlog is full, and poll() cannot wait for a Unix socket's backlog
                if deadline.left() == 0:
                    raise MissedDeadline(
                        f"the service at {str(path)!r} took no connection within {limit:.3g} s"
                    ) from None
                time.sleep(_RETRY)
    except OSError as error:
        sock.close()
        raise error if isinstance(error, NNBurstError) else _unreachable(address, path, error) from None
    except BaseException:
        sock.close()
        raise


def _unreachable(address: str, path: Path, error: OSError) -> DeviceUnavailable | ResourceExhausted:
    number, option = error.errno, f"--socket {path}" if address.startswith(_PREFIX) else f"--name {address}"
    if number == errno.ENOENT and _lock_path(path).exists() and (pid := _owner(_lock_path(path))[0]):
        return DeviceUnavailable(
            f"process {pid} serves {address!r}, but {str(path)!r} was removed: end it, and start it again"
        )
    if number in (errno.ENOENT, errno.ENOTDIR, errno.ECONNREFUSED):
        others = [] if address.startswith(_PREFIX) else [each.name for each in running_services() if each.pid]
        instead = f"the services here are {', '.join(others)}" if others else f"start one with: nnburst serve {option}"
        return DeviceUnavailable(f"no service runs at {str(path)!r}: {instead}")
    if number == errno.EACCES:
        return DeviceUnavailable(
            f"user {os.geteuid()} may not reach {str(path)!r}: its owner has to start the service with --allow-uid "
            f"{os.geteuid()}"
        )
    reason = f"{str(path)!r} cannot be reached: {meaning(number or 0)}"
    is_full = number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
    return ResourceExhausted(reason) if is_full else DeviceUnavailable(reason)


# ---- looking around -------------------------------------------------------------------------------------------


class FoundService(Struct, frozen=True):
    """A service found by its name in a runtime directory.

    Attributes:
        name: The name from ``nnburst serve --name``.
        path: Path of the socket.
        pid: Process id of the owner; 0 if the owner has ended, None if only a service manager has the socket.
        sandbox: The owner's line about its sandbox.
    """

    name: str
    path: Path
    pid: int | None
    sandbox: str


def running_services() -> Iterator[FoundService]:
    """Yield the services of this user and of the system, even dead ones, without connecting.

    Directories that another user owns or can write are skipped.
    """
    seen: set[str] = set()
    trusted = trusted_uids()
    for directory in (runtime_directory(), SYSTEM_DIRECTORY):
        is_used = directory.is_dir() and not _why_distrusted(directory, trusted)
        names = {path.stem for kind in ("sock", "lock") for path in directory.glob(f"*.{kind}") if is_used}
        for name in sorted(names - seen):
            found = FoundService(name, directory / f"{name}.sock", *_owner(directory / f"{name}.lock"))
            if found.pid or found.path.exists():
                seen.add(name)
                yield found


def owner_of(address: str, trust_uid: int | Collection[int] = ()) -> int:
    """Return the pid of the process that owns a name; 0 if the name's lock file shows no owner.

    Arguments and errors are those of `dial`.
    """
    return _owner(_lock_path(_find(address, trusted_uids(trust_uid))))[0] or 0


def _owner(lock: Path) -> tuple[int | None, str]:
    """Return the pid of the service that holds a lock file, and the line that describes its sandbox.

    The pid is 0 if the lock file shows no owner, None if there is no lock file.
    """
    try:
        try:
            fd = _open_lock(lock, os.O_RDONLY)
        except FileNotFoundError:
            fd = _open_removed(lock)
    except FileNotFoundError:
        return None, ""
    except OSError:
        return 0, ""
    try:
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _WHOLE_FILE)  # the lock is only read: a service may be starting
        return _read(fd) if _FLOCK.unpack(found)[0] != fcntl.F_UNLCK else (0, "")
    finally:
        os.close(fd)
