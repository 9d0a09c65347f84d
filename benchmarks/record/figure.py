"""One figure: the distribution of every 32-byte row, and what the payload does to the transport."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nnburst.cli.bench.rounds import Case
from nnburst.cli.bench.sampling import Result, Samples
from nnburst.cli.targets import size

_COLOURS = {"a": "#8a8a8a", "b": "#8a8a8a", "c": "#4c78a8", "d": "#d62728", "e": "#b9a27c", "f": "#d62728"}
_LABELS = {"a": "C threads", "c": "MessageQueue", "d": "burst Execution.run()", "e": "others"}


def _label(case: Case) -> str:
    where = ", one core" if case.one_core else ""
    return f"{case.title} · {case.wait}{where}"


def _density(samples: Samples, edges: Any) -> Any:
    """Return the share of samples per logarithmic bin, smoothed, highest = 1."""
    counts, _ = np.histogram(np.clip(samples / 1e3, edges[0], edges[-1]), edges)
    kernel = np.array([1.0, 2.0, 3.0, 2.0, 1.0]) / 9
    smooth = np.convolve(counts, kernel, mode="same")
    return smooth / max(float(smooth.max()), 1.0)


def _ridges(axes: Any, rows: Sequence[tuple[Case, Result]]) -> None:
    ordered = sorted(rows, key=lambda row: row[1].percentiles_us()["p50_us"], reverse=True)
    low = min(float(np.percentile(result.samples, 0.1)) for _, result in ordered) / 1e3
    high = max(float(np.percentile(result.samples, 99)) for _, result in ordered) / 1e3
    edges = np.geomspace(low * 0.8, high * 1.5, 260)
    centres = np.sqrt(edges[:-1] * edges[1:])
    seen: set[str] = set()
    for y, (case, result) in enumerate(ordered):
        colour = _COLOURS[case.group]
        height = 0.85 * _density(result.samples, edges)
        group = "a" if case.group == "b" else case.group
        label = None if group in seen else _LABELS[group]
        seen.add(group)
        axes.fill_between(centres, y, y + height, where=height > 0.002, color=colour, alpha=0.75, lw=0, label=label)
        figures = result.percentiles_us()
        axes.plot([figures["p50_us"]] * 2, [y, y + 0.85], color="black", lw=1.2)
        axes.plot([figures["p99_us"]] * 2, [y, y + 0.3], color="black", lw=1.2, ls=":")
        axes.annotate(
            f"{figures['p50_us']:.2f}" if figures["p50_us"] < 10 else f"{figures['p50_us']:.1f}",
            (edges[-1], y + 0.2), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8.5,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(-0.1, len(ordered) + 0.1)
    axes.set_yticks([y + 0.3 for y in range(len(ordered))], [_label(case) for case, _ in ordered], fontsize=8.5)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("round trip, µs (bar: median, also at the right; dots: p99)")
    axes.set_title("32-byte round trip: distribution of every way to ask", loc="left", fontsize=11)
    axes.grid(axis="x", which="major", alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper right", fontsize=8.5, frameon=True)


def _payloads(axes: Any, rows: Sequence[tuple[Case, Result]]) -> None:
    for prefix, label, colour, marker in (
        ("pool-", "burst, tensor in a shared pool", "#d62728", "o"),
        ("pipe-", "multiprocessing.Pipe.send_bytes", "#b9a27c", "s"),
    ):
        points = [(case.payload_bytes, result) for case, result in rows if case.key.startswith(prefix)]
        if points:
            x = [nbytes for nbytes, _ in points]
            low, middle, high = (
                [float(np.percentile(result.samples, q)) / 1e3 for _, result in points] for q in (10, 50, 90)
            )
            axes.fill_between(x, low, high, color=colour, alpha=0.2, lw=0)
            axes.plot(x, middle, color=colour, marker=marker, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    ticks = sorted({case.payload_bytes for case, _ in rows})
    axes.set_xticks(ticks, [*map(size, ticks)], fontsize=8.5, rotation=30, ha="right")
    axes.set_xlabel("payload")
    axes.set_ylabel("round trip, µs (line: median; band: p10 to p90)")
    axes.set_title("What the payload costs", loc="left", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8.5)


def write_figure(path: Path, cases: Sequence[Case], results: Mapping[str, Result], caption: str) -> None:
    """Draw the measurements into a PNG file.

    Args:
        path: Where to write.
        cases: The rows.
        results: Measurements; rows that did not run are left out.
        caption: One line on the conditions.

    Raises:
        ImportError: matplotlib is not installed.
    """
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    ran = [(case, results[case.key]) for case in cases if results[case.key].rounds]
    small, large = [r for r in ran if r[0].group in _LABELS or r[0].group == "b"], [r for r in ran if r[0].group == "f"]
    panels = [(draw, rows) for draw, rows in ((_ridges, small), (_payloads, large)) if rows]
    if not panels:
        return
    widths = [2.1 if draw is _ridges else 1.0 for draw, _ in panels]
    height = max(4.5, 1.6 + 0.42 * len(small))
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(7.2 * sum(widths) / 1.5, height), width_ratios=widths, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for panel, (draw, rows) in zip(axes[0], panels, strict=True):
        draw(panel, rows)
    figure.supxlabel(caption, fontsize=8, color="#555555", x=0.01, ha="left")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
