"""Show that a program survives a model that crashes or hangs, and that its next call works again.

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
"""Seconds after which a run counts as hanging, many times its usual duration."""


def main() -> int:
    image = images(1)
    with nnburst.launch() as service, service.session(MODEL, on_death="restart", retry=1, timeout=LONG) as session:

        def answer() -> bool:
            """Run until there is an answer. A service that hangs is killed."""
            while True:
                try:
                    return right(image, session.run(None, {"image": image})[0])
                except nnburst.MissedDeadline:
                    print("it hangs: killing it")
                    if service.alive:
                        service.kill()  # nothing else can end it, and only its own work is lost

        answers = [answer()]
        os.kill(service.pid, signal.SIGKILL)  # the kernel of a machine without free memory does this
        while service.alive:  # the signal may arrive after one more answer
            time.sleep(0.001)
        answers.append(answer())  # a run that the death interrupts is repeated once
        os.kill(service.pid, signal.SIGSTOP)  # a model that never returns looks like this
        while "State:\tT" not in Path(f"/proc/{service.pid}/status").read_text():
            time.sleep(0.001)
        answers.append(answer())
        for restart in session.restarts:
            print(f"another service after {restart.seconds:.1f} s: {restart.reason}")
    print("every answer is right" if all(answers) and len(session.restarts) >= 2 else "there are WRONG answers")
    return 0 if all(answers) else 1


if __name__ == "__main__":
    sys.exit(main())
