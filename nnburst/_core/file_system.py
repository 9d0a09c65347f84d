"""A check of a file's file system, so that accesses to the file cannot hang.

The server of a FUSE or NFS file may never answer, and a thread that waits for the server cannot be stopped. So the
file system is found first, without an access to the file:

* Memory files and ``/dev/shm`` answer ``F_GET_SEALS``, which the kernel handles alone.
* For other files, the id of the mount is looked up in this process's list of mounts.
* If the list lacks the mount, because it belongs to another namespace or to the kernel, the kernel is asked for the
  file system's magic number. For the FUSE mount of another user, the kernel answers without asking the server.

An overlay hides the file systems below it. An overlay is trusted only if it is in this process's list of mounts,
because an administrator made those mounts.
"""

from __future__ import annotations

import errno
import fcntl
import os

from ..errors import GeneralFailure, NNBurstError
from ._nnburst import lib
from .errno import check

REMOTE_FILES = "NNBURST_REMOTE_FILES"
"""Environment variable; 1 allows files whose server may never answer."""

_LOCAL = {
    "tmpfs": 0x01021994,
    "devtmpfs": 0x01021994,
    "ramfs": 0x858458F6,
    "hugetlbfs": 0x958458F6,
    "ext2": 0xEF53,
    "ext3": 0xEF53,
    "ext4": 0xEF53,
    "xfs": 0x58465342,
    "btrfs": 0x9123683E,
    "f2fs": 0xF2F52010,
    "zfs": 0x2FC12FC1,
    "bcachefs": 0xCA451A4E,
    "jfs": 0x3153464A,
    "nilfs2": 0x3434,
    "vfat": 0x4D44,
    "exfat": 0x2011BAB0,
    "ntfs3": 0x7366746E,
    "squashfs": 0x73717368,
    "erofs": 0xE0F5E1E2,
    "iso9660": 0x9660,
    "udf": 0x15013346,
    "ubifs": 0x24051905,
    "jffs2": 0x72B6,
    "dma-buf": 0x444D4142,
    "pipefs": 0x50495045,
    "sockfs": 0x534F434B,
    "anon_inodefs": 0x09041934,
}
"""Magic numbers of file systems without a server, by name.

``pipefs``, ``sockfs`` and ``anon_inodefs`` contain no regular files.
"""
_OVERLAY = 0x794C7630


def check_file_system(fd: int) -> None:
    """Refuse a descriptor on a file system that could block this process for ever.

    Raises:
        GeneralFailure: The file system could block, and ``NNBURST_REMOTE_FILES`` is not 1.
        OSError: The descriptor is not open.
    """
    if _in_memory(fd) or os.environ.get(REMOTE_FILES) == "1":
        return
    name = _remote_file_system(fd)
    if name is not None:
        raise GeneralFailure(
            f"fd {fd} is on {name}, which could block this process for ever; copy the file to a local disk, "
            f"or set {REMOTE_FILES}=1 for the process of the device"
        )


def may_block(fd: int) -> bool:
    """Return True if closing a descriptor may wait for another process.

    Closing a FUSE or NFS file waits for its server. Closing a network socket waits if its creator set SO_LINGER.
    """
    try:
        if _in_memory(fd):
            return False
        maker = lib.nnb_fd_socket_maker(fd)
        if maker >= 0:
            return maker != os.getpid()
        if not os.readlink(f"/proc/self/fd/{fd}").startswith("/"):  # Links of pipes begin with "pipe:".
            return False
        return _remote_file_system(fd) is not None
    except (OSError, NNBurstError) as error:  # The descriptor is not open, or the process has no descriptor left.
        return getattr(error, "errno", None) != errno.EBADF


def _in_memory(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        return True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False


def _remote_file_system(fd: int) -> str | None:
    """Return the name of a file's file system if it is not local, so that reading may hang; None if it is local."""
    name = _mount_type(_mount_of(fd))
    if name is None:
        magic = check(lib.nnb_fd_filesystem(fd))
        if magic in _LOCAL.values():
            return None
        return "an overlay of another mount namespace" if magic == _OVERLAY else f"file system {magic:#x}"
    return None if name in _LOCAL or name == "overlay" else name


def _mount_of(fd: int) -> bytes:
    """Return the id of the mount that a file was opened through."""
    with open(f"/proc/self/fdinfo/{fd}", "rb") as file:
        return next((line.split()[1] for line in file if line.startswith(b"mnt_id:")), b"")


def _mount_type(mount: bytes) -> str | None:
    """Return a mount's file system type from this process's list of mounts; None if the mount is not listed."""
    with open("/proc/self/mountinfo", "rb") as file:
        for line in file:
            if line.split(None, 1)[0] == mount:
                return line.partition(b" - ")[2].split()[0].decode("ascii", "replace")
    return None
