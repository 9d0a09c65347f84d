"""Classify camera-like frames in a memory ring that another process writes.

The "camera" process draws a bright spot into the slots of one shared memory pool, in turn, and sends the number of
each new frame's slot through a message queue. Like a real camera, it does not wait. Here each slot has an execution
that was bound once; the service reads the pixels in place, and nothing is copied. Every slot begins with a number
that is odd while the camera draws, so that a frame that was overwritten during a run is noticed and not counted.

Usage: python examples/camera_ring.py [--frames 1000] [--fps 200] [--slots 8]
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable

import numpy as np

import nnburst
from nnburst import OperandType
from nnburst.fmq import MessageQueue, MQDescriptor

SIDE = 64
HEADER = 64
SLOT = HEADER + SIDE * SIDE
READY = np.dtype([("slot", "<u4"), ("frame", "<u4")])
CORNERS = ("top left", "top right", "bottom left", "bottom right")


def corner_of(frame: int) -> int:
    """Return the quarter that contains a frame's spot. Both processes call this function to check the answers."""
    return (frame * 2654435761 >> 16) % 4


def camera(ring: nnburst.Memory, queue: MQDescriptor, slots: int, frames: int, fps: float) -> None:
    """Draw frames into the ring. Runs in its own process."""
    ready = MessageQueue.attach(queue, READY)
    rng = np.random.default_rng(3)
    noise = rng.integers(0, 40, (4, SIDE, SIDE), np.uint8)
    due = time.monotonic()
    for frame in range(frames):
        slot = frame % slots
        number = ring.array(np.uint64, (1,), slot * SLOT)
        pixels = ring.array(np.uint8, (SIDE, SIDE), slot * SLOT + HEADER)
        number[0] = 2 * frame + 1  # the number is odd while the frame is drawn
        pixels[...] = noise[frame % 4]
        row, column = divmod(corner_of(frame), 2)
        y, x = row * SIDE // 2 + 8, column * SIDE // 2 + 8
        pixels[y : y + 16, x : x + 16] = 250
        number[0] = 2 * frame + 2
        if ready.available_to_write or frame == frames - 1:  # a full queue drops all frames but the last
            ready.write_blocking(np.array([(slot, frame)], READY), timeout=30)  # this wakes the reader
        due += 1 / fps
        time.sleep(max(0.0, due - time.monotonic()))
    ready.close()
    ring.close()


def build() -> nnburst.Model:
    """Return a model that computes the brightness of each quarter: the average of 32 × 32 pixels of the uint8 frame."""
    b = nnburst.ModelBuilder()
    image = b.input("image", OperandType.TENSOR_QUANT8_ASYMM, (1, SIDE, SIDE, 1), scale=1 / 255, zero_point=0)
    quarters = b.average_pool_2d(image, SIDE // 2, stride=SIDE // 2, padding="valid")
    b.output("brightness", b.reshape(quarters, [1, 4]))
    return b.build()


def look(
    service: nnburst.Service,
    ring: nnburst.Memory,
    ready: MessageQueue,
    slots: int,
    last: int,
    camera_runs: Callable[[], bool],
) -> dict[str, float]:
    """Classify frames up to the number `last`. The camera never overwrites the last frame."""
    seen = torn = wrong = 0
    newest = -1
    with service.session(build()) as session:
        numbers = [ring.array(np.uint64, (1,), slot * SLOT) for slot in range(slots)]
        frames = [ring.array(np.uint8, (1, SIDE, SIDE, 1), slot * SLOT + HEADER) for slot in range(slots)]
        bound = [session.bind(memory={"image": frame}) for frame in frames]
        started = time.perf_counter()
        while newest < last:
            try:
                news = ready.read_blocking(1, timeout=2)
            except nnburst.MissedDeadline:
                if camera_runs():
                    continue
                raise SystemExit("the camera process has ended without a last frame") from None
            while (more := ready.read(1)) is not None:
                news = more  # only the newest frame is of interest
            slot, newest = news[0].tolist()
            bound[slot].run()
            if int(numbers[slot][0]) != 2 * newest + 2:
                torn += 1  # the camera has overwritten the frame during the run
                continue
            seen += 1
            wrong += int(np.argmax(bound[slot].outputs["brightness"])) != corner_of(newest)
        seconds = time.perf_counter() - started
    return {"seen": seen, "torn": torn, "wrong": wrong, "lost": last + 1 - seen - torn, "fps": seen / seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=1000)
    parser.add_argument("--fps", type=float, default=200.0, help="what the camera delivers")
    parser.add_argument("--slots", type=int, default=8, help="frames that the ring holds")
    options = parser.parse_args()
    if options.frames < 1 or options.slots < 2 or not options.fps > 0:
        parser.error("at least 1 frame, 2 slots and a rate above 0")
    spawn = multiprocessing.get_context("spawn")
    with (
        nnburst.launch() as service,
        nnburst.Memory.ashmem(options.slots * SLOT, "camera-ring") as ring,
        MessageQueue(READY, 4 * options.slots) as ready,
    ):
        arguments = (ring, ready.descriptor, options.slots, options.frames, options.fps)
        process = spawn.Process(target=camera, args=arguments, daemon=True)
        process.start()
        try:
            found = look(service, ring, ready, options.slots, options.frames - 1, process.is_alive)
        finally:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
    print("{seen:.0f} frames at {fps:.0f} a second; {torn:.0f} overwritten meanwhile, {lost:.0f} lost".format(**found))
    print("every answer is right" if not found["wrong"] else f"{found['wrong']:.0f} answers are WRONG")
    return 1 if found["wrong"] or not found["seen"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
