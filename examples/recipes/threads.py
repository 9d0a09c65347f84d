"""Use one session from several threads, without a lock.

python examples/recipes/threads.py
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from detector import MODEL, images, right

import nnburst

THREADS = 8


def main() -> int:
    pictures = images(400)
    with nnburst.Session(MODEL, concurrency=4) as session:  # 4 calls run at the same time; more calls wait in order

        def classify(i: int) -> bool:
            (scores,) = session.run(None, {"image": pictures[i : i + 1]})  # each call gets a new array
            return right(pictures[i], scores)

        with ThreadPoolExecutor(THREADS) as pool:
            answers = list(pool.map(classify, range(len(pictures))))
        print(f"{THREADS} threads, {len(answers)} answers; {session.latency()}")
    print("every answer is right" if all(answers) else "there are WRONG answers")
    return 0 if all(answers) else 1


if __name__ == "__main__":
    sys.exit(main())
