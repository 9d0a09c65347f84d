"""`nnburst explain`: says in words where the time of slow runs went."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click
from msgspec import Struct, to_builtins

__all__ = ["explain"]

_USUAL = 2.0
"""Times the median: what takes no longer is as usual."""
_LEAST_SHARE = 0.05
"""Of a run's time: lesser parts are not worth a word."""


class _Run(Struct, frozen=True):
    """A run of the trace; times in µs.

    Attributes:
        model, number, client, service: Which one it is: processes of its program and of its service.
        start: On the clock of the trace.
        whole: From the call to the answer.
        waiting, running, returning: Its parts; 0 where the service told no times.
        together: Requests that ran as one, 63 for more; 0 if it ran alone.
    """

    model: str
    number: int
    client: int
    service: int
    start: float
    whole: float
    waiting: float
    running: float
    returning: float
    together: int

    @property
    def runs_from(self) -> float:
        return self.start + self.waiting

    @property
    def runs_to(self) -> float:
        return self.runs_from + self.running


class _Explained(Struct, frozen=True):
    """A slow run, and those that kept it waiting: µs by model and client."""

    run: _Run
    behind: dict[str, float]
    words: str


@click.command()
@click.argument("trace", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--runs", "most", type=click.IntRange(1), default=3, show_default=True, help="The slowest of each model.")
@click.option("--model", "wanted", default=None, metavar="NAME", help="Of this model alone.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def explain(trace: Path, most: int, wanted: str | None, as_json: bool) -> None:
    """Say where the time of the slowest runs of a trace went, and whom they waited for.

    \b
    nnburst trace -o trace.json python program.py
    nnburst explain trace.json
    """
    runs = _read(trace)
    models = sorted({run.model for run in runs})
    if not runs:
        raise click.ClickException(f"{trace} has no runs: the command that was traced has run no model through nnburst")
    if wanted is not None and wanted not in models:
        raise click.ClickException(f"--model {wanted}: {trace} has runs of {', '.join(models)}")
    chosen = models if wanted is None else [wanted]
    found = {model: _explain([run for run in runs if run.model == model], runs, most) for model in chosen}
    if as_json:
        click.echo(json.dumps({model: to_builtins(slowest) for model, slowest in found.items()}))
        return
    for model, slowest in found.items():
        of_model = sorted(run.whole for run in runs if run.model == model)
        p99 = of_model[-1 - len(of_model) // 100]
        click.echo(f"{model}: {len(of_model):,} runs, half within {_time(median(of_model))}, 99 % within {_time(p99)}")
        for each in slowest:
            click.echo(f"  run {each.run.number} of process {each.run.client}, {_time(each.run.whole)}: {each.words}")


def _read(trace: Path) -> list[_Run]:
    """Put the slices of each run together.

    Raises:
        click.ClickException: It is no trace of nnburst's.
    """
    found: list[dict[str, dict[str, Any]]] = []
    try:
        for event in json.loads(trace.read_bytes())["traceEvents"]:
            if event["ph"] == "X":
                if event["name"] == "run":  # whose parts follow
                    found.append({})
                found[-1][event["name"]] = event
        return [_together(parts) for parts in found]
    except OSError as error:
        raise click.ClickException(f"{trace} cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise click.ClickException(f"{trace} is no trace: nnburst trace -o FILE COMMAND makes one") from None


def _together(parts: dict[str, dict[str, Any]]) -> _Run:
    waiting, running, returning = (float(parts.get(name, {}).get("dur", 0)) for name in ("queue", "execute", "return"))
    whole, about = parts["run"], parts["run"]["args"]
    service = int(parts.get("execute", whole)["pid"])
    return _Run(
        str(about["model"]), int(about["run"]), int(whole["pid"]), service,
        float(whole["ts"]), float(whole["dur"]), waiting, running, returning, int(about.get("together", 0)),
    )  # fmt: skip


def _explain(runs: Sequence[_Run], others: Iterable[_Run], most: int) -> list[_Explained]:
    """Return the slowest runs of a model, the slowest first."""
    usual = {part: median(getattr(run, part) for run in runs) for part in ("waiting", "running", "returning")}
    slowest = sorted(runs, key=lambda run: -run.whole)[:most]
    in_order = sorted(others, key=lambda run: run.runs_to)
    ends = [run.runs_to for run in in_order]
    explained = []
    for run in slowest:
        behind: dict[str, float] = defaultdict(float)
        for other in in_order[bisect_left(ends, run.start) :]:
            shared = min(other.runs_to, run.runs_from) - max(other.runs_from, run.start)
            if other is not run and other.service == run.service and shared > 0:
                behind[f"{other.model} of process {other.client}"] += shared
        explained.append(_Explained(run, dict(behind), _words(run, behind, usual)))
    return explained


def _words(run: _Run, behind: dict[str, float], usual: dict[str, float]) -> str:
    if not run.running:
        return "the service told no times"
    said = []
    for part, what in (
        ("waiting", "waiting" + _whom(run, behind)),
        ("running", "running" + (f" in a batch of {run.together}" if run.together else "")),
        ("returning", "until the program had the answer"),
    ):
        took: float = getattr(run, part)
        if took >= _LEAST_SHARE * run.whole:
            how = "as usual" if took <= _USUAL * usual[part] else f"usually {_time(usual[part])}"
            said.append((took, f"{_time(took)} {what} ({how})"))
    return "; ".join(words for _, words in sorted(said, reverse=True))


def _whom(run: _Run, behind: dict[str, float]) -> str:
    longest = [(took, who) for who, took in behind.items() if took >= _LEAST_SHARE * run.whole]
    if not longest and run.together:
        return " for others to run with"
    if not longest:
        return " for nothing that was traced: a service that slept, or other programs"
    return " behind " + ", ".join(f"{who} ({_time(took)})" for took, who in sorted(longest, reverse=True))


def _time(micros: float) -> str:
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if micros >= size:
            return f"{micros / size:.3g} {unit}"
    return f"{micros:.3g} µs"
