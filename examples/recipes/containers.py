"""Run a service in one container and a program in another. The containers share a directory with a socket.

    python examples/recipes/containers.py

`unshare` (util-linux) makes the namespaces of each container: processes, mounts, IPC, network, host name. Memory is
passed through the socket as descriptors, so neither `--ipc=host` nor `--shm-size` is needed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile

from detector import MODEL, images, right

import nnburst

CONTAINER = [
    *("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child=TERM", "--mount-proc"),
    *("--ipc", "--net", "--uts"),
]
NO_CONTAINERS = 77
"""Exit status if the system refuses new namespaces."""


def program(address: str) -> int:
    """Run the model from the second container. Return the exit status."""
    pictures = images(100)
    with nnburst.connect(address) as service, service.session(MODEL) as session:
        answers = [right(picture, session.run(None, {"image": picture[None]})[0]) for picture in pictures]
    print("every answer is right" if all(answers) else "there are WRONG answers")
    return 0 if all(answers) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.address:
        return program(options.address)
    if subprocess.run([*CONTAINER, "true"], check=False).returncode:
        print("this system makes no namespaces for this user", file=sys.stderr)
        return NO_CONTAINERS
    with tempfile.TemporaryDirectory() as shared:
        serve = [sys.executable, "-P", "-m", "nnburst", "serve", "--socket", f"{shared}/vision.sock"]
        with subprocess.Popen([*CONTAINER, *serve], stdout=subprocess.PIPE, text=True) as service:
            assert service.stdout is not None
            print(service.stdout.readline().strip())
            again = [sys.executable, __file__, "--address", f"unix:{shared}/vision.sock"]
            status = subprocess.run([*CONTAINER, *again], check=False).returncode
            service.kill()  # this kills the container; the service gets SIGTERM
            service.stdout.read()  # this returns when the service has ended
    return status


if __name__ == "__main__":
    sys.exit(main())
