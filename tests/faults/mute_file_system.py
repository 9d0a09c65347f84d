"""A FUSE server that stops to answer: run with ``unshare -Urm``, it hands out descriptors of a file on it.

Usage: ``mute_file_system.py <fd of a socket> <directory> <size> <mute>``. It sends two descriptors of a file of that
size, one opened on FUSE and one through an overlay on FUSE (read-only), and answers every request except those that
are named in ``mute`` until the socket is closed.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import struct
import sys
import threading
from pathlib import Path

LOOKUP, GETATTR, OPEN, READ, STATFS, RELEASE, FLUSH, INIT, OPENDIR, POLL = 1, 3, 14, 15, 17, 18, 25, 26, 27, 40
FORGET, INTERRUPT, BATCH_FORGET = 2, 36, 42
IN = struct.Struct("=IIQQIIIHH")
ROOT, FILE = 1, 2
VALID = 1 << 30
"""Seconds that what was answered stays true."""


def mount(source: str, target: Path, kind: str, options: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), os.fsencode(target), kind.encode(), 0, options.encode()) != 0:
        raise OSError(ctypes.get_errno(), f"mount of {kind} at {target}")


def attributes(node: int, size: int) -> bytes:
    mode, links = (0o40755, 2) if node == ROOT else (0o100600, 1)
    blocks = 0 if node == ROOT else size
    return struct.pack("=6Q10I", node, blocks, 8, 0, 0, 0, 0, 0, 0, mode, links, 0, 0, 0, 4096, 0)


def serve(device: int, size: int, mute: set[str], armed: threading.Event) -> None:
    while True:
        request = os.read(device, 1 << 18)
        _, opcode, unique, node = IN.unpack_from(request)[:4]
        if opcode in (FORGET, BATCH_FORGET, INTERRUPT):
            continue
        silent = {"read": READ, "getattr": GETATTR, "statfs": STATFS, "flush": FLUSH, "poll": POLL}
        if armed.is_set() and opcode in {silent[name] for name in mute}:
            continue
        error, body = 0, b""
        if opcode == INIT:
            body = struct.pack("=4I2H2I2H8I", 7, 31, 1 << 16, 0, 12, 10, 1 << 16, 1, 16, 0, *[0] * 8)
        elif opcode == LOOKUP:
            name = request[IN.size :].rstrip(b"\0")
            if name == b"file":
                body = struct.pack("=4Q2I", FILE, 1, VALID, VALID, 0, 0) + attributes(FILE, size)
            else:
                error = -2
        elif opcode == GETATTR:
            body = struct.pack("=Q2I", VALID, 0, 0) + attributes(node, size)
        elif opcode in (OPEN, OPENDIR):
            body = struct.pack("=Q2I", 7, 0, 0)
        elif opcode == READ:
            body = bytes(min(size, struct.unpack_from("=QQI", request, IN.size)[2]))
        elif opcode == STATFS:
            body = struct.pack("=5Q4I", 0, 0, 0, 0, 0, 4096, 255, 4096, 0) + bytes(24)
        elif opcode not in (RELEASE, FLUSH):
            error = -38
        os.write(device, struct.pack("=IiQ", 16 + len(body), error, unique) + body)


def main() -> None:
    link = socket.socket(fileno=int(sys.argv[1]))
    directory, size, mute = Path(sys.argv[2]), int(sys.argv[3]), set(filter(None, sys.argv[4].split(",")))
    device = os.open("/dev/fuse", os.O_RDWR)
    below, empty, above = (directory / name for name in ("below", "empty", "above"))
    for place in (below, empty, above):
        place.mkdir()
    mount("test", below, "fuse", f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other")
    armed = threading.Event()
    threading.Thread(target=serve, args=(device, size, mute, armed), daemon=True).start()
    fds = [os.open(below / "file", os.O_RDWR)]
    mount("overlay", above, "overlay", f"lowerdir={below}:{empty}")
    fds.append(os.open(above / "file", os.O_RDONLY))
    socket.send_fds(link, [b"!"], fds)
    for fd in fds:  # a process that ends with them open waits for itself
        os.close(fd)
    armed.set()
    link.sendall(b"!")
    select.select([link], [], [])
    os._exit(0)  # the kernel ends what waits for the server


main()
