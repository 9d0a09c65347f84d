"""Write digits.npz from scikit-learn's copy of the UCI digits, to document the origin of the file.

Usage: python examples/digits/make_data.py [--output FILE]      (needs scikit-learn)
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

DATA = Path(__file__).resolve().parents[2] / "nnburst" / "cli" / "demo" / "data"
HELD_OUT = 450
SPLIT_SEED = 1998


def main() -> None:
    """Write images, labels and the hold-out split."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=DATA / "digits.npz")
    output = parser.parse_args().output

    from sklearn.datasets import load_digits

    digits = load_digits()
    held_out = np.zeros(len(digits.target), dtype=np.bool_)
    held_out[np.random.default_rng(SPLIT_SEED).permutation(held_out.size)[:HELD_OUT]] = True
    np.savez_compressed(
        output, images=digits.images.astype(np.uint8), labels=digits.target.astype(np.uint8), held_out=held_out
    )
    print(f"{output}: {held_out.size} images, {held_out.sum()} of them held out, {output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
