"""Keep two services with the model: when one dies, the other replaces it at once, and a new standby is started.

python examples/recipes/standby.py

After a death, `Session(on_death="restart", retry=1)` starts a service and compiles the model. If that takes too long,
use a standby: it doubles the memory, but no request waits.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from detector import MODEL, images, right

import nnburst


class Standby:
    """A pair of sessions, one in use and one on standby. Any number of threads may call `run`."""

    def __init__(self, open_session: Callable[[], nnburst.Session]) -> None:
        self._open = open_session
        self._opening = ThreadPoolExecutor(1)
        self._changing = threading.Lock()
        self.in_use, self._next = open_session(), self._opening.submit(open_session)

    def run(self, inputs: dict[str, Any]) -> list[Any]:
        """Run the model. If the service dies, the request is repeated once on the other service."""
        session = self.in_use
        try:
            return session.run(None, inputs)
        except nnburst.DeadObject:
            with self._changing:
                if self.in_use is session:  # this request is the first to notice this death
                    self.in_use, self._next = self._next.result(), self._opening.submit(self._open)
            return self.in_use.run(None, inputs)

    def close(self) -> None:
        self._opening.shutdown()
        self._next.result().close()
        self.in_use.close()


def main() -> int:
    image, answers, services = images(1), [], set()
    pair = Standby(partial(nnburst.Session, MODEL))
    for _ in range(3):
        answers.append(right(image, pair.run({"image": image})[0]))
        services.add(pair.in_use.service.pid)
        os.kill(pair.in_use.service.pid, signal.SIGKILL)
        while pair.in_use.service.alive:  # the signal may arrive after one more answer
            time.sleep(0.001)
    answers.append(right(image, pair.run({"image": image})[0]))
    pair.close()
    print(f"{len(services)} services were killed")
    print("every answer is right" if all(answers) else "there are WRONG answers")
    return 0 if all(answers) else 1


if __name__ == "__main__":
    sys.exit(main())
