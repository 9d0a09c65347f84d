"""Run ten thousand inputs as fast as possible, in batches that are filled while the service runs earlier batches.

    python examples/recipes/throughput.py [--batch 64] [--inputs 10000]

For files on disk, use `nnburst run MODEL --many DIRECTORY`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator

import numpy as np
from detector import images, model, right

import nnburst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--inputs", type=int, default=10_000)
    options = parser.parse_args()
    pictures = images(options.inputs)

    def inputs() -> Iterator[dict[str, np.ndarray]]:
        for picture in pictures:  # pictures come on demand: only a few batches are in memory at a time
            yield {"image": picture[None]}

    with nnburst.Session(model(0)) as session:  # 0 allows any number of images
        started = time.perf_counter()
        one_by_one = [session.run(None, each)[0] for each in inputs()]
        alone = time.perf_counter() - started
        started = time.perf_counter()
        together = [scores for (scores,) in session.run_many(inputs(), batch=options.batch)]
        batched = time.perf_counter() - started
    alone, batched = (1e6 * seconds / options.inputs for seconds in (alone, batched))
    print(f"run: {alone:.1f} µs each; run_many(batch={options.batch}): {batched:.1f} µs each")
    same = right(pictures, np.concatenate(together)) and right(pictures, np.concatenate(one_by_one))
    print("every answer is right" if same else "there are WRONG answers")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
