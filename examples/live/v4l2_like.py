"""Process NV12 frames of a camera that works like a V4L2 device, whose buffers circulate between two processes.

The camera owns a ring of buffers and hands out a descriptor of each, as VIDIOC_EXPBUF does. It fills only queued
buffers (QBUF) and reports full ones (DQBUF); a frame without a queued buffer is lost. As with much hardware, a line in
a buffer is longer than the picture is wide.

Here each buffer is bound once, as two inputs of a model: brightness, and the pairs of U and V. The service reads
whole lines in place, and the model cuts off their ends. With --copy, the inputs are as wide as the picture: the model
is simpler, and the service copies each line.

    python v4l2_like.py [--frames 500] [--fps 250] [--buffers 4] [--copy]
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import select
import socket
import statistics
import struct
import time

import numpy as np

import nnburst
from nnburst import Memory, OperandType
from nnburst.memory import FORMATS, ImageLayout

WIDTH, HEIGHT, BYTES_PER_LINE = 160, 120, 192  # VIDIOC_S_FMT answers these
SIZE = BYTES_PER_LINE * HEIGHT * 3 // 2
TURN = struct.Struct("<II")  # (buffer, sequence) for DQBUF and QBUF, which ignores the sequence
COLOURS = ((90, 240), (54, 34), (240, 110), (128, 128))  # U and V of red, green, blue and grey
CORNERS = ("top left", "top right", "bottom left", "bottom right")


def scene_of(sequence: int) -> tuple[int, int]:
    """Return the corner that contains a frame's spot, and the frame's colour. Both processes call this function."""
    return (sequence * 2654435761 >> 16) % 4, (sequence * 2246822519 >> 13) % 4


def layout(width: int) -> ImageLayout:
    """Return the layout of an NV12 image in a buffer of the camera. Planes are (offset, bytes per line)."""
    planes = ((0, BYTES_PER_LINE), (BYTES_PER_LINE * HEIGHT, BYTES_PER_LINE))
    return ImageLayout(width, HEIGHT, FORMATS["NV12"].fourcc, planes)


def camera(wire: socket.socket, buffers: int, frames: int, fps: float) -> None:
    """Film into queued buffers. Runs in its own process."""
    noise = np.random.default_rng(3).integers(16, 40, (HEIGHT, WIDTH), np.uint8)
    with wire, contextlib.ExitStack() as stack:
        ring = [stack.enter_context(Memory.ashmem(SIZE)) for _ in range(buffers)]
        images = [stack.enter_context(Memory.from_image(buffer.fds[0], layout(WIDTH))) for buffer in ring]
        socket.send_fds(wire, [b"buffers"], [buffer.fds[0] for buffer in ring])
        queued: list[int] = []
        due = time.monotonic() + 60  # the first QBUF stands for STREAMON
        for sequence in range(frames):
            while select.select([wire], [], [], max(0.0, due - time.monotonic()))[0]:
                if not (message := wire.recv(TURN.size)):
                    return  # the viewer does not start
                queued.append(TURN.unpack(message)[0])
                if sequence == 0:
                    due = time.monotonic()
            due += 1 / fps
            if not queued:
                continue  # the frame is lost
            index = queued.pop(0)
            corner, colour = scene_of(sequence)
            ring[index].begin_access(write=True)  # the CPU plays the part of the hardware
            luma, chroma = (plane[0] for plane in images[index].planes())
            luma[..., 0] = noise
            y, x = (HEIGHT // 2 * (corner // 2) + 20, WIDTH // 2 * (corner % 2) + 20)
            luma[y : y + 20, x : x + 20] = 235
            chroma[:] = COLOURS[colour]
            ring[index].end_access(write=True)
            wire.sendall(TURN.pack(index, sequence))
        wire.shutdown(socket.SHUT_WR)  # the last frame was sent
        while wire.recv(TURN.size):
            pass


def build(width: int) -> nnburst.Model:
    """Return a model that computes each quarter's brightness, U and V. A line of its inputs has `width` pixels."""
    b = nnburst.ModelBuilder()
    kind, real = OperandType.TENSOR_QUANT8_ASYMM, {"scale": 1.0, "zero_point": 0}
    luma = b.input("luma", kind, (1, HEIGHT, width, 1), **real)
    chroma = b.input("chroma", kind, (1, HEIGHT // 2, width // 2, 2), **real)
    if width > WIDTH:
        luma = b.strided_slice(luma, [0, 0, 0, 0], [1, HEIGHT, WIDTH, 1], [1, 1, 1, 1])
        chroma = b.strided_slice(chroma, [0, 0, 0, 0], [1, HEIGHT // 2, WIDTH // 2, 2], [1, 1, 1, 1])
    quarter = (HEIGHT // 2, WIDTH // 2)
    b.output("brightness", b.average_pool_2d(luma, quarter, stride=quarter, padding="valid"))
    b.output("colour", b.average_pool_2d(chroma, quarter, stride=quarter, padding="valid"))
    return b.build()


def watch(service: nnburst.Service, wire: socket.socket, buffers: int, width: int) -> str:
    """Run the model on each frame until the camera ends. Return a summary."""
    _, fds, _, _ = socket.recv_fds(wire, 64, buffers)
    seen = wrong = last = 0
    micros = []
    with contextlib.ExitStack() as stack:
        for fd in fds:
            stack.enter_context(open(fd, "rb", buffering=0))  # this closes the descriptor at the end
        session = stack.enter_context(service.session(build(width)))
        bound = []
        for fd in fds:
            image = stack.enter_context(Memory.from_image(fd, layout(width)))
            planes = [stack.enter_context(image.plane_memory(index)) for index in range(2)]
            bound.append(session.bind(memory={"luma": planes[0], "chroma": planes[1]}))
            bound[-1].run()  # the first run maps the buffer
        for index in range(len(fds)):
            wire.sendall(TURN.pack(index, 0))  # QBUF
        while message := wire.recv(TURN.size):  # DQBUF
            index, sequence = TURN.unpack(message)
            started = time.perf_counter()
            bound[index].run()
            micros.append((time.perf_counter() - started) * 1e6)
            corner = int(bound[index].outputs["brightness"].argmax())
            pair = bound[index].outputs["colour"].reshape(2).astype(int)
            colour = min(range(4), key=lambda i: int(np.abs(pair - COLOURS[i]).sum()))
            wrong += (corner, colour) != scene_of(sequence)
            seen, last = seen + 1, sequence
            wire.sendall(TURN.pack(index, 0))  # QBUF
    if not seen:
        raise SystemExit("the camera has ended without a frame")
    how = "read where they are" if width == BYTES_PER_LINE else "copied"
    print(f"{seen} frames in {len(fds)} buffers, {last + 1 - seen} lost; lines are {how}")
    print(f"the last one: a spot {CORNERS[corner]}; a run takes {statistics.median(micros):.0f} µs")
    return "every answer is right" if not wrong else f"{wrong} answers are WRONG"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=500)
    parser.add_argument("--fps", type=float, default=250.0, help="what the camera delivers")
    parser.add_argument("--buffers", type=int, default=4, help="in the ring, at most 32 as in V4L2")
    parser.add_argument("--copy", action="store_true", help="inputs as wide as the picture")
    options = parser.parse_args()
    if options.frames < 1 or not 1 <= options.buffers <= 32 or not options.fps > 0:
        parser.error("at least 1 frame, 1 to 32 buffers and a rate above 0")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    arguments = (theirs, options.buffers, options.frames, options.fps)
    process = multiprocessing.get_context("spawn").Process(target=camera, args=arguments, daemon=True)
    with ours, nnburst.launch() as service:
        process.start()
        theirs.close()
        try:
            verdict = watch(service, ours, options.buffers, WIDTH if options.copy else BYTES_PER_LINE)
        finally:
            ours.close()  # this ends a camera that is still filming
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
    print(verdict)
    return int("WRONG" in verdict or process.exitcode != 0)


if __name__ == "__main__":
    raise SystemExit(main())
