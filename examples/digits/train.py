"""Train the convolutional network of `nnburst demo` in NumPy, and write its weights.

    8×8×1 → conv 3×3×16 → ReLU → max pool 2×2 → conv 3×3×32 → ReLU → fully connected 10 → softmax

Usage: python examples/digits/train.py [--epochs 200] [--seed 7] [--output FILE]

The hold-out part of the data is used once, at the end. Weights are in the layout of NNAPI operations: filters [out,
height, width, in], fully connected weights [units, inputs].
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

DATA = Path(__file__).resolve().parents[2] / "nnburst" / "cli" / "demo" / "data"
BATCH = 64

Array = npt.NDArray[np.float32]
Weights = dict[str, Array]


def initial_weights(rng: np.random.Generator) -> Weights:
    """Return He-initialised weights."""

    def draw(*shape: int) -> Array:
        fan_in = int(np.prod(shape[1:]))
        return (rng.standard_normal(shape) * np.sqrt(2.0 / fan_in)).astype(np.float32)

    return {
        "conv1_filter": draw(16, 3, 3, 1),
        "conv1_bias": np.zeros(16, np.float32),
        "conv2_filter": draw(32, 3, 3, 16),
        "conv2_bias": np.zeros(32, np.float32),
        "dense_weights": draw(10, 4 * 4 * 32),
        "dense_bias": np.zeros(10, np.float32),
    }


def patches(x: Array) -> Array:
    """Return the 3×3 neighbourhood of each pixel, with zeros outside: [n, h, w, c] → [n, h, w, 3, 3, c]."""
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    return np.ascontiguousarray(windows.transpose(0, 1, 2, 4, 5, 3))


def conv(x: Array, weights: Array, bias: Array) -> tuple[Array, Array]:
    """Return the 3×3 convolution of `x`. Also return the patches of `x`, for `conv_gradients`."""
    taken = patches(x).reshape(*x.shape[:3], -1)
    return taken @ weights.reshape(len(weights), -1).T + bias, taken


def conv_gradients(taken: Array, weights: Array, d_out: Array) -> tuple[Array, Array, Array]:
    """Return the gradients of a convolution's input, filter and bias."""
    flat = d_out.reshape(-1, d_out.shape[-1])
    d_weights = (flat.T @ taken.reshape(len(flat), -1)).reshape(weights.shape)
    # The gradient of the input is a convolution with the filter, rotated by 180° and with swapped channels.
    turned = np.ascontiguousarray(weights[:, ::-1, ::-1, :].transpose(3, 1, 2, 0))
    d_x = patches(d_out).reshape(*d_out.shape[:3], -1) @ turned.reshape(len(turned), -1).T
    return d_x, d_weights, flat.sum(axis=0)


def forward(w: Weights, x: Array) -> tuple[Array, dict[str, Array]]:
    """Return the ten probabilities of each image, and the intermediate arrays for `gradients`."""
    a1, taken1 = conv(x, w["conv1_filter"], w["conv1_bias"])
    r1 = np.maximum(a1, 0)
    blocks = r1.reshape(len(x), 4, 2, 4, 2, 16)
    pooled = blocks.max(axis=(2, 4))
    a2, taken2 = conv(pooled, w["conv2_filter"], w["conv2_bias"])
    r2 = np.maximum(a2, 0)
    flat = r2.reshape(len(x), -1)
    logits = flat @ w["dense_weights"].T + w["dense_bias"]
    exp = np.exp(logits - logits.max(axis=1, keepdims=True))
    kept = {"taken1": taken1, "r1": r1, "blocks": blocks, "pooled": pooled, "taken2": taken2, "r2": r2, "flat": flat}
    return exp / exp.sum(axis=1, keepdims=True), kept


def gradients(w: Weights, x: Array, labels: npt.NDArray[np.uint8]) -> Weights:
    """Return the gradient of the mean cross entropy for each weight."""
    probabilities, kept = forward(w, x)
    d_logits = probabilities.copy()
    d_logits[np.arange(len(x)), labels] -= 1
    d_logits /= len(x)
    d_r2 = (d_logits @ w["dense_weights"]).reshape(kept["r2"].shape)
    d_pooled, d_filter2, d_bias2 = conv_gradients(kept["taken2"], w["conv2_filter"], d_r2 * (kept["r2"] > 0))
    is_max = kept["blocks"] == kept["pooled"][:, :, None, :, None, :]
    d_blocks = is_max / is_max.sum(axis=(2, 4), keepdims=True) * d_pooled[:, :, None, :, None, :]
    d_r1 = d_blocks.reshape(kept["r1"].shape).astype(np.float32)
    _, d_filter1, d_bias1 = conv_gradients(kept["taken1"], w["conv1_filter"], d_r1 * (kept["r1"] > 0))
    return {
        "conv1_filter": d_filter1,
        "conv1_bias": d_bias1,
        "conv2_filter": d_filter2,
        "conv2_bias": d_bias2,
        "dense_weights": d_logits.T @ kept["flat"],
        "dense_bias": d_logits.sum(axis=0),
    }


def augmented(x: Array, rng: np.random.Generator) -> Array:
    """Return the images with a little noise, some of them shifted by one pixel."""
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    # Most images are not shifted, as digits fill the whole height. Cross-validation on training data gave the odds.
    shifts = rng.choice(3, p=(0.1, 0.8, 0.1), size=(len(x), 2))
    moved = np.stack([image[dy : dy + 8, dx : dx + 8] for image, (dy, dx) in zip(padded, shifts, strict=True)])
    return np.clip(moved + rng.normal(0, 0.05, moved.shape), 0, 1).astype(np.float32)


def train(x: Array, labels: npt.NDArray[np.uint8], epochs: int, seed: int) -> Weights:
    """Return weights trained with Adam, weight decay and a cosine schedule."""
    rng = np.random.default_rng(seed)
    w = initial_weights(rng)
    mean = {name: np.zeros_like(value) for name, value in w.items()}
    square = {name: np.zeros_like(value) for name, value in w.items()}
    step, total = 0, epochs * (-(-len(x) // BATCH))
    for epoch in range(epochs):
        order = rng.permutation(len(x))
        for start in range(0, len(x), BATCH):
            chosen = order[start : start + BATCH]
            step += 1
            rate = 2e-3 * 0.5 * (1 + np.cos(np.pi * step / total))
            for name, g in gradients(w, augmented(x[chosen], rng), labels[chosen]).items():
                mean[name] += 0.1 * (g - mean[name])
                square[name] += 0.001 * (g * g - square[name])
                direction = (mean[name] / (1 - 0.9**step)) / (np.sqrt(square[name] / (1 - 0.999**step)) + 1e-8)
                decay = 1e-2 if value_decays(name) else 0.0
                w[name] -= (rate * (direction + decay * w[name])).astype(np.float32)
        if (epoch + 1) % 25 == 0:
            print(f"epoch {epoch + 1}: accuracy on the training part {accuracy(w, x, labels):.4f}")
    return w


def value_decays(name: str) -> bool:
    """Return True if weight decay applies: to filters and weights, but not to biases."""
    return not name.endswith("bias")


def accuracy(w: Weights, x: Array, labels: npt.NDArray[np.uint8]) -> float:
    """Return the fraction of images whose most likely digit is correct."""
    return float((forward(w, x)[0].argmax(axis=1) == labels).mean())


def main() -> None:
    """Train the network and write its weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--data", type=Path, default=DATA / "digits.npz")
    parser.add_argument("--output", type=Path, default=DATA / "weights.npz")
    args = parser.parse_args()

    with np.load(args.data) as digits:
        images, labels, held_out = digits["images"], digits["labels"], digits["held_out"]
    x = (images[..., None] / np.float32(16)).astype(np.float32)
    started = time.monotonic()
    w = train(x[~held_out], labels[~held_out], args.epochs, args.seed)
    np.savez_compressed(args.output, **w)
    print(
        f"{args.output}: {args.output.stat().st_size} bytes after {time.monotonic() - started:.0f} s, "
        f"held-out accuracy {accuracy(w, x[held_out], labels[held_out]):.4f}"
    )


if __name__ == "__main__":
    main()
