"""Connect three programs without a copy: a camera draws frames, a service runs a model, a viewer prints results.

    python examples/shared/camera_service_viewer.py [--frames 200] [--fps 200]

The camera owns a ring of frames in shared memory. It sends the ring's descriptor to the viewer, then the number of
each new frame's slot. Each slot begins with a number that is odd while the camera draws. The viewer binds each slot
as an input, so that the service, a third process, reads the pixels in place: the viewer never touches them. The program
starts `nnburst serve`, runs itself as camera and as viewer, and checks the answers.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import nnburst
from nnburst import Memory, OperandType

SIDE = 64
FRAME = (1, SIDE, SIDE, 1)
SLOTS = 8
HEADER = 64
SLOT = HEADER + SIDE * SIDE
NEWS = struct.Struct("<II")
CORNERS = ("top left", "top right", "bottom left", "bottom right")


def corner_of(frame: int) -> int:
    """Return the quarter that contains a frame's spot. Both programs call this function to check the answers."""
    return (frame * 2654435761 >> 16) % 4


def camera(place: str, frames: int, fps: float) -> None:
    """Draw frames into the ring, for one viewer."""
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door,
        Memory.ashmem(SLOTS * SLOT, "camera-ring") as ring,
    ):
        door.bind(place)
        door.listen(1)
        print("ready", flush=True)
        viewer, _ = door.accept()
        with viewer:
            socket.send_fds(viewer, [b"ring"], ring.fds)
            for frame in range(frames):
                begin = frame % SLOTS * SLOT
                number = ring.array(np.uint64, (1,), begin)
                picture = ring.array(np.uint8, (SIDE, SIDE), begin + HEADER)
                number[0] = 2 * frame + 1
                picture[...] = 20
                row, column = (SIDE // 2 * half + 8 for half in divmod(corner_of(frame), 2))
                picture[row : row + 16, column : column + 16] = 250
                number[0] = 2 * frame + 2
                viewer.sendall(NEWS.pack(frame % SLOTS, frame))
                time.sleep(1 / fps)


def brightness() -> nnburst.Model:
    """Return a model that computes the brightness of each quarter: the average of 32 × 32 pixels of the uint8 frame."""
    b = nnburst.ModelBuilder()
    image = b.input("image", OperandType.TENSOR_QUANT8_ASYMM, FRAME, scale=1 / 255, zero_point=0)
    quarters = b.average_pool_2d(image, SIDE // 2, stride=SIDE // 2, padding="valid")
    b.output("brightness", b.reshape(quarters, [1, 4]))
    return b.build()


def viewer(place: str, name: str) -> None:
    """Run the model on the newest frame, repeatedly."""
    seen = wrong = overwritten = 0
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as news,
        nnburst.connect(name) as service,
        service.session(brightness(), on_death="restart") as session,
    ):
        news.connect(place)
        _, (descriptor,), _, _ = socket.recv_fds(news, 16, 1)
        with Memory.mmap_fd(descriptor, SLOTS * SLOT) as ring:
            os.close(descriptor)
            numbers = [ring.array(np.uint64, (1,), slot * SLOT) for slot in range(SLOTS)]
            views = [ring.array(np.uint8, FRAME, slot * SLOT + HEADER) for slot in range(SLOTS)]
            bound = [session.bind(memory={"image": view}) for view in views]
            while message := newest(news):
                slot, frame = NEWS.unpack(message)
                bound[slot].run()
                if int(numbers[slot][0]) != 2 * frame + 2:  # the camera has overwritten the frame during the run
                    overwritten += 1
                    continue
                seen += 1
                wrong += int(bound[slot].outputs["brightness"].argmax()) != corner_of(frame)
            for execution in bound:
                execution.close()
    print(f"viewer: {seen} frames seen by process {service.pid}, {overwritten} overwritten, {wrong} wrong")
    sys.exit(bool(wrong or not seen))


def newest(news: socket.socket) -> bytes:
    """Wait for a message and return the newest; empty when the camera has disconnected."""
    message = news.recv(16)
    while message and select.select([news], [], [], 0)[0]:
        later = news.recv(16)
        if not later:  # the camera has disconnected; this was its last message
            break
        message = later
    return message


def main() -> int:
    parser = argparse.ArgumentParser(description="A camera, a service and a viewer share frames without a copy.")
    parser.add_argument("--role", choices=["camera", "viewer"], help=argparse.SUPPRESS)
    parser.add_argument("--place", default="", help=argparse.SUPPRESS)
    parser.add_argument("--name", default=f"example-{os.getpid()}", help="name of the service")
    parser.add_argument("--frames", type=int, default=200)
    parser.add_argument("--fps", type=float, default=200.0)
    options = parser.parse_args()
    if options.frames < 1 or not options.fps > 0:
        parser.error("at least 1 frame, and a rate above 0")
    if options.role == "camera":
        camera(options.place, options.frames, options.fps)
        return 0
    if options.role == "viewer":
        viewer(options.place, options.name)

    with tempfile.TemporaryDirectory() as directory:
        place = str(Path(directory, "camera.sock"))
        serve = [sys.executable, "-P", "-m", "nnburst", "serve", "--json", "--name", options.name]
        command = [sys.executable, __file__, "--place", place, "--name", options.name]
        rate = ["--frames", str(options.frames), "--fps", str(options.fps)]
        started: list[subprocess.Popen[str]] = []
        try:
            for program in ([*serve, "--device", "nnburst-reference"], [*command, "--role", "camera", *rate]):
                started.append(subprocess.Popen(program, stdout=subprocess.PIPE, text=True))
            ready = [process.stdout.readline() for process in started if process.stdout is not None]
            print(f"broker of the service: process {json.loads(ready[0])['pid']}; camera: process {started[1].pid}")
            done = subprocess.run([*command, "--role", "viewer"], stdout=subprocess.PIPE, text=True, check=False)
        finally:
            for process in started:
                process.terminate()
                process.communicate()
    print(done.stdout, end="")
    print("every answer is right, and no frame was copied" if not done.returncode else "it went WRONG")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
