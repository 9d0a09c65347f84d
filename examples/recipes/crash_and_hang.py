"""A model that crashes or hangs does not take the program along, and the next call works again.

python examples/recipes/crash_and_hang.py
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from detector import MODEL, images, right

import nnburst

LONG = 2.0
"""Seconds after which a run is a hang: many times what it takes."""


def main() -> int:
    image = images(1)
    with nnburst.launch() as service, service.session(MODEL, on_death="restart", retry=1, timeout=LONG) as session:

        def answer() -> bool:
            """Ask until there is an answer; a service that does not come to an end is ended."""
            while True:
                try:
                    return right(image, session.run(None, {"image": image})[0])
                except nnburst.MissedDeadline:
                    print("it hangs: killing it")
                    if service.alive:
                        service.kill()  # nothing else ends it, and nothing else is lost

        answers = [answer()]
        os.kill(service.pid, signal.SIGKILL)  # as the kernel does on a machine that is out of memory
        while service.alive:  # on a CPU of its own it may answer once more before it is hit
            time.sleep(0.001)
        answers.append(answer())  # a run that the death hits is repeated once
        os.kill(service.pid, signal.SIGSTOP)  # as a model that never returns
        while "State:\tT" not in Path(f"/proc/{service.pid}/status").read_text():
            time.sleep(0.001)
        answers.append(answer())
        for restart in session.restarts:
            print(f"another service after {restart.seconds:.1f} s: {restart.reason}")
    print("every answer is right" if all(answers) and len(session.restarts) >= 2 else "there are WRONG answers")
    return 0 if all(answers) else 1


if __name__ == "__main__":
    sys.exit(main())
