"""Serve a network from an asyncio server, whose loop is never blocked and needs no thread per run.

    python examples/recipes/asyncio_server.py

A client sends images of 64 float32 and gets 10 float32 for each. A client that disconnects cancels its run.
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np
from detector import CLASSES, MODEL, PIXELS, images, right

import nnburst

CLIENTS = 20


async def serve(session: nnburst.Session, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            data = await reader.readexactly(4 * PIXELS)
            (scores,) = await session.arun(None, {"image": np.frombuffer(data, np.float32)[None]})
            writer.write(scores.tobytes())
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass  # the client has disconnected, or the service has died: `DeadObject` is a ConnectionError, too
    finally:
        writer.close()  # the client notices if a run fails


async def client(path: str, image: np.ndarray) -> bool:
    reader, writer = await asyncio.open_unix_connection(path)
    answers = []
    for _ in range(5):
        writer.write(image.tobytes())
        answers.append(right(image, np.frombuffer(await reader.readexactly(4 * CLASSES), np.float32)))
    writer.close()
    await writer.wait_closed()
    return all(answers)


async def main() -> int:
    path = f"\0recipe-{id(asyncio)}"  # an abstract socket needs no file
    with nnburst.Session(MODEL) as session:
        server = await asyncio.start_unix_server(lambda r, w: serve(session, r, w), path)
        async with server:
            answers = await asyncio.gather(*(client(path, image) for image in images(CLIENTS)))
        print(f"{CLIENTS} connections; {session.latency()}")
    print("every answer is right" if all(answers) else "there are WRONG answers")
    return 0 if all(answers) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
