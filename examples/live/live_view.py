"""A progress line and a latency plot for loops that run for a while."""

from __future__ import annotations

import sys
import time

import numpy as np


class LiveView:
    """Recorder of the time of each step, which shows a line on the terminal a few times per second.

    Args:
        what: Beginning of the line.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._started = time.perf_counter()
        self._shown = self._started
        self._since = 0
        self.microseconds: list[float] = []

    def step(self, seconds: float, news: str = "") -> None:
        """Record a step of `seconds`, and show the line."""
        self.microseconds.append(seconds * 1e6)
        now = time.perf_counter()
        if now - self._shown > 0.25 and sys.stderr.isatty():
            recent = self.microseconds[self._since :]
            rate = len(recent) / (now - self._shown)
            print(
                f"\r{self._what}: {len(self.microseconds)} steps, {rate:,.0f}/s, p50 {np.median(recent):,.0f} µs, "
                f"p99 {np.percentile(recent, 99):,.0f} µs  {news:<24}",
                end="",
                file=sys.stderr,
                flush=True,
            )
            self._shown, self._since = now, len(self.microseconds)

    def summary(self) -> str:
        """Return a summary of all steps in one line."""
        if sys.stderr.isatty():
            print(file=sys.stderr)
        rate = len(self.microseconds) / (time.perf_counter() - self._started)
        p50, p99, worst = np.percentile(self.microseconds, [50, 99, 100])
        return f"{rate:,.0f}/s, p50 {p50:,.1f} µs, p99 {p99:,.1f} µs, max {worst:,.1f} µs"

    def plot(self, path: str) -> None:
        """Draw the latency of every step into an image file. Prints a message if matplotlib is not installed."""
        try:
            import matplotlib
        except ImportError:
            print("--plot needs matplotlib: pip install matplotlib", file=sys.stderr)
            return
        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, (over_time, spread) = pyplot.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
        over_time.plot(self.microseconds, ".", markersize=2)
        over_time.set(xlabel="step", ylabel="µs", yscale="log", title=f"{self._what}: latency of each step")
        ordered = np.sort(self.microseconds)
        spread.plot(ordered, np.linspace(0, 100, len(ordered)))
        spread.set(xlabel="µs", ylabel="% of steps", xscale="log", title="cumulated")
        figure.savefig(path, dpi=110)
        pyplot.close(figure)
        print(f"wrote {path}", file=sys.stderr)
