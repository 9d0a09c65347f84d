"""Run four workers of a web server or task queue with one service, which has the model in memory once.

    python examples/recipes/web_workers.py [fastapi_app | gunicorn_app | celery_app] [--memory MIB]

The program sends requests to the workers, replaces the service, and sends requests again. --memory compares the memory
with that of gunicorn workers that each have a model of MIB MiB. Needs `pip install 'nnburst[onnx]'` and the packages
of the app.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from detector import images, right, save

from nnburst.watch import RowKind, find_services, look

WORKERS, REQUESTS = 4, 40
PACKAGES = {"fastapi_app": ("fastapi", "uvicorn"), "gunicorn_app": ("gunicorn",), "celery_app": ("celery",)}
MODEL_EACH = """
    import gunicorn_app, onnxruntime, os, pathlib
    opened = onnxruntime.InferenceSession("detector.onnx")
    gunicorn_app.session = lambda: opened
    app = gunicorn_app.app
    pathlib.Path(f"{os.getpid()}.opened").touch()
"""
"""Code that gives each worker of the app its own model."""
FILES_AS_BROKER = """
    import os, time, uuid
    from celery.backends.filesystem import FilesystemBackend
    from celery_app import app
    from kombu.transport.filesystem import Channel
    from kombu.utils.encoding import ensure_bytes
    from kombu.utils.json import dumps

    def write(name, text):  # a reader finds a file with all of its text
        with open(unseen := str(uuid.uuid4()), "wb") as file:
            file.write(ensure_bytes(text))
        os.replace(unseen, name)

    def put(channel, queue, payload, **_):
        write(f"{{time.monotonic_ns():020}}_{{uuid.uuid4()}}.{{queue}}.msg", dumps(payload))

    Channel._put, FilesystemBackend.set = put, lambda self, key, text: write(self._filename(key), text)
    folders = dict.fromkeys(("data_folder_in", "data_folder_out", "control_folder"), "{here}")
    app.conf.update(
        broker_url="filesystem://", broker_transport_options={{"polling_interval": 0.01, **folders}},
        result_backend="file://{here}",
    )
"""
"""Code that gives the Celery app a directory in place of a broker."""


@contextlib.contextmanager
def running(*command: str, **options: object) -> Iterator[subprocess.Popen[str]]:
    """Start Python with arguments, and end it after the block."""
    with subprocess.Popen([sys.executable, *command], text=True, **options) as process:
        try:
            yield process
        finally:
            process.terminate()


@contextlib.contextmanager
def serving() -> Iterator[subprocess.Popen[str]]:
    with running(*"-m nnburst serve --name vision --model detector=detector.onnx".split(), stdout=-1) as service:
        assert service.stdout is not None
        service.stdout.readline()  # the service is ready
        yield service


@contextlib.contextmanager
def working(app: str) -> Iterator[tuple[subprocess.Popen[str], Callable[[np.ndarray], list[list[float]]]]]:
    """Run the workers of an app. Yield their parent process, and a function that sends a request to a worker."""
    if app == "celery_app":
        Path("with_files.py").write_text(textwrap.dedent(FILES_AS_BROKER.format(here=os.getcwd())))
        sys.path.insert(0, os.getcwd())
        boxes = importlib.import_module("celery_app").boxes
        importlib.import_module("with_files")
        command = f"-m celery -q --app with_files worker --without-gossip --without-mingle --concurrency {WORKERS}"
        with running(*command.split()) as server:
            yield server, lambda image: boxes.delay(image.tolist()).get(60, interval=0.01)
        return
    with socket.create_server(("127.0.0.1", 0)) as listener:
        uvicorn, gunicorn = "uvicorn --timeout-worker-healthcheck 60 --fd ", "gunicorn --bind fd://"
        server = f"{uvicorn if app == 'fastapi_app' else gunicorn}{listener.fileno()} --log-level warning"
        command = f"-m {server} --workers {WORKERS} {app}:app"
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/boxes"

        def ask(image: np.ndarray) -> list[list[float]]:
            np.save(body := io.BytesIO(), image)
            with urllib.request.urlopen(url, body.getvalue(), timeout=60) as answer:
                return json.load(answer)

        with running(*command.split(), pass_fds=[listener.fileno()]) as server:
            yield server, ask


def processes(pid: int) -> set[int]:
    """Return the ids of a process and all its descendants."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # the process has just ended
        return set()
    return {pid}.union(*(processes(int(child)) for child in children))


def with_session(server: int, service: int) -> int:
    """Return the number of a server's workers that have a session on a service."""
    pages = [page for pid in processes(service) for page in find_services(pid)]
    clients = [row.client_pid for page in pages for row in look(page).of(RowKind.BURST)]
    return len(processes(server).intersection(clients))


def answers(ask: Callable[[np.ndarray], list[list[float]]]) -> bool:
    pictures = images(REQUESTS)[:, None]
    with ThreadPoolExecutor(2 * WORKERS) as pool:
        return all(right(*pair) for pair in zip(pictures, map(np.array, pool.map(ask, pictures)), strict=True))


def all_answer(server: subprocess.Popen[str], service: int, ask: Callable[[np.ndarray], list[list[float]]]) -> bool:
    """Send requests until each worker has a session on a service. Return True if all answers were right."""
    is_right = answers(ask)
    while with_session(server.pid, service) < WORKERS:
        if server.poll() is not None:
            sys.exit(f"the server has ended with status {server.returncode}")
        is_right &= answers(ask)
        time.sleep(0.01)
    return is_right


def mebibytes(*roots: int) -> int:
    """Return the MiB of memory of processes, in which shared pages count once."""
    files = [Path(f"/proc/{pid}/smaps_rollup") for root in roots for pid in processes(root)]
    return sum(int(file.read_text().split("\nPss:")[1].split()[0]) for file in files) >> 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("app", nargs="?", default="gunicorn_app", choices=PACKAGES)
    parser.add_argument("--memory", type=int, default=0, metavar="MIB")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([".", str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        os.environ["NNBURST_RUNTIME_DIR"] = directory  # this directory has the services' names
        save("detector.onnx", options.memory)
        if not all(map(importlib.util.find_spec, PACKAGES[options.app])):
            sys.exit(f"this example needs: pip install {' '.join(PACKAGES[options.app])}")
        with contextlib.ExitStack() as stack:
            with serving() as service:
                server, ask = stack.enter_context(working(options.app))
                is_right = all_answer(server, service.pid, ask)
            with serving() as service:  # the workers continue with a new service of the same name
                is_right &= all_answer(server, service.pid, ask)
                shared = mebibytes(service.pid, server.pid)
        print(f"{WORKERS} workers of {options.app} on one service: {shared} MiB")
        if options.memory:
            Path("each.py").write_text(textwrap.dedent(MODEL_EACH))
            with working("each") as (server, ask):
                while len(list(Path().glob("*.opened"))) < WORKERS:
                    time.sleep(0.01)
                is_right &= answers(ask)
                print(f"{WORKERS} workers with a model each: {mebibytes(server.pid)} MiB")
        command = "-m nnburst demo --save detector.onnx".split()
        subprocess.run([sys.executable, *command], stdout=subprocess.DEVNULL, check=True)
        with serving(), working(options.app) as (server, ask):
            is_right &= len(ask(np.load("detector.npy"))) == 5  # the image has five squares
    print("every answer is right" if is_right else "there are WRONG answers")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
