"""A web server that forks its workers and replaces them: the model is in memory once, each worker has a connection.

    python examples/recipes/web_workers.py

nnburst is imported before the fork, and nothing of it is opened: what a process inherits is refused. With gunicorn
`worker` is the body of the hook `post_fork`. Needs `pip install 'nnburst[onnx]'`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
from detector import images, right, save

from nnburst import connect

WORKERS, REQUESTS = 3, 30


def worker(listener: socket.socket, address: str) -> None:
    """Answer requests at a socket that all workers have inherited."""
    with connect(address) as service:
        session = service.session("detector", on_death="restart", timeout=5)  # gets over a restart of the service

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                image = np.frombuffer(self.rfile.read(int(self.headers["Content-Length"])), np.float32)
                (scores,) = session.run(None, {"image": image[None]})
                self.send_response(200)
                self.send_header("X-Worker", str(os.getpid()))
                self.end_headers()
                self.wfile.write(scores.tobytes())

            def log_message(self, *_: object) -> None:
                pass

        server = HTTPServer(listener.getsockname(), Handler, bind_and_activate=False)
        server.socket = listener
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # the session is closed; before it is open it just ends
        server.serve_forever()


def fork_worker(listener: socket.socket, address: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        worker(listener, address)
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(0)  # what `main` has opened, the directory and the service, is not the worker's to close


def stop(worker: int) -> None:
    os.kill(worker, signal.SIGTERM)
    os.waitpid(worker, 0)


def main() -> int:
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        save(f"{directory}/detector.onnx")
        command = [sys.executable, "-P", "-m", "nnburst", "serve", "--socket", f"{directory}/s"]
        service = stack.enter_context(
            subprocess.Popen([*command, "--model", f"detector={directory}/detector.onnx"], stdout=subprocess.PIPE)
        )
        stack.callback(service.terminate)
        assert service.stdout is not None
        service.stdout.readline()  # it is ready
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        workers = [fork_worker(listener, f"unix:{directory}/s") for _ in range(WORKERS)]
        stack.callback(lambda: [stop(worker) for worker in workers])
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        seen, answers = set(), []
        for count, image in enumerate(images(REQUESTS)):
            if count % (REQUESTS // WORKERS) == REQUESTS // WORKERS - 1:  # each is replaced once, and the others go on
                stop(workers.pop(0))
                workers.append(fork_worker(listener, f"unix:{directory}/s"))
            with urllib.request.urlopen(url, image.tobytes(), timeout=30) as answer:
                answers.append(right(image, np.frombuffer(answer.read(), np.float32)))
                seen.add(answer.headers["X-Worker"])
    print(f"{REQUESTS} requests, answered by {len(seen)} workers")
    print("every answer is right" if all(answers) else "there are WRONG answers")
    return 0 if all(answers) else 1


if __name__ == "__main__":
    sys.exit(main())
