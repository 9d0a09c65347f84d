"""`nnburst top`: show the load of services, from statistics in shared memory."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .targets import Seconds, size, whole_number

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from ..watch.reader import Viewer
    from ..watch.stats import ServiceStats

_UNLIMITED = 100_000
_HEADINGS = ("runs/s", "busy", "queue p50", "p99", "run p50", "p99", "max", "sleeps", "hits", "failed")
_BRIEF = (0, 1, 4, 5, 9)
"""Indexes of the headings on a narrow terminal."""


@click.command()
@click.argument("services", nargs=-1, metavar="[NAME|PID]...")
@click.option("--once", is_flag=True, help="Print once, with totals since the start of each service.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list at each update, one per line.")
@click.option("--interval", type=Seconds(0.1, 3600), default=1.0, show_default=True, help="Seconds between updates.")
@click.option("--every-user", is_flag=True, help="Show services of all users; only for root.")
def top(services: tuple[str, ...], once: bool, as_json: bool, interval: float, every_user: bool) -> None:
    """Show running services, including child services, with their models, bursts, resources and limits.

    Without arguments, shows all services of this user. Only root can name services of other users. "..." in the last
    line stands for rows that the terminal has no room for. To see them, give the names of services, or use --once.
    """
    watched = _Watched(services, every_user=every_user)
    looks = watched.look(rates=not once)
    if services and not looks:
        raise click.ClickException(
            f"{', '.join(services)}: no service; `nnburst ls` lists shared ones. A program that runs models in its "
            "own process (in_process) has no statistics page: Session.stats and .latency() say what it does"
        )

    def updates() -> Iterator[Sequence[dict[str, Any]]]:
        if once:
            yield looks
        while not once:
            time.sleep(interval)
            yield watched.look()

    with contextlib.suppress(KeyboardInterrupt):
        if as_json:
            for each in updates():
                click.echo(json.dumps(each))
            return
        from rich.console import Console
        from rich.live import Live

        console = Console()
        if not console.is_terminal:  # files and pipes get the full width
            console.width = _UNLIMITED
        if once or not console.is_terminal:
            for each in updates():
                console.print(_table(each, console.width))
            return
        with Live(_table(looks, console.width), console=console, auto_refresh=False) as live:
            for each in updates():
                live.update(_table(each, console.width), refresh=True)


class _Watched:
    """The requested services, whose statistics are read repeatedly."""

    def __init__(self, wanted: Sequence[str], *, every_user: bool = False) -> None:
        self._wanted = set(wanted)
        self._every_user = every_user or bool(wanted)
        self._pids = [pid for pid in map(whole_number, wanted) if pid is not None]
        self._viewers: dict[str, Viewer] = {}
        self._last: dict[str, ServiceStats] = {}
        self._used: dict[int, tuple[float, int]] = {}
        """Time of the last report, and processor time used until then, by process."""

    def look(self, *, rates: bool = True) -> list[dict[str, Any]]:
        """Return a report of each service. With `rates`, reports cover the time since the last call."""
        from ..errors import DeviceUnavailable
        from ..watch._report import report
        from ..watch.reader import OF_USER, Viewer, find_services
        from ..watch.stats import RowKind

        found = {f"{page.pid} {page.path}": page for page in find_services(every_user=self._every_user)}
        reports = []
        limits: dict[int, Mapping[str, int]] = {}
        for key in list(self._viewers):
            if key not in found:
                del self._viewers[key]
                self._last.pop(key, None)
        for key, page in found.items():
            try:
                viewer = self._viewers.get(key) or Viewer(page)
                stats = viewer.look()
            except DeviceUnavailable as error:
                if page.pid in self._pids:
                    raise click.ClickException(f"{page.pid}: {error}") from error
                continue  # the service has ended, or its page is invalid
            self._viewers[key] = viewer
            if workers := stats.of(RowKind.PROCESS):  # the page belongs to the workers' parent, which runs no model
                limits.update((row.client_pid, row.counters) for row in workers)
                continue
            if self._wanted and stats.name.partition(OF_USER)[0] not in self._wanted and page.pid not in self._pids:
                continue
            reports.append(report(stats, self._last.get(key) if rates else None))
            self._last[key] = stats
        for each in reports:
            each["process"] = self._process(each, limits.get(each["pid"], {}), rates=rates)
        return reports

    def _process(self, service: dict[str, Any], limits: Mapping[str, int], *, rates: bool) -> dict[str, Any]:
        from ..watch.stats import ACCOUNT
        from ..watch.usage import Usage, usage_of

        pid, now = service["pid"], time.monotonic()
        usage = usage_of(pid) or Usage(0, 0, 0, 0)
        since, before = self._used.get(pid, (now - service["age_s"], 0)) if rates else (now - service["age_s"], 0)
        self._used[pid] = now, usage.processor_ns
        busy = (usage.processor_ns - before) / 1e9 / max(now - since, 1e-3)
        used = {"bytes": usage.bytes, "threads": usage.threads, "fds": usage.fds, "busy": round(max(0.0, busy), 4)}
        return {**dict.fromkeys(ACCOUNT, 0), **limits, **used}


def _table(reports: Sequence[dict[str, Any]], width: int) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if not reports:
        return Text("no services to watch; programs start them with nnburst.Session(...), people with: nnburst serve")
    table = Table("service", "client", "model", box=None, pad_edge=False, header_style="bold")
    columns = _BRIEF if width < 120 else range(len(_HEADINGS))
    for i in columns:
        table.add_column(_HEADINGS[i], justify="right", no_wrap=True)
    accounts = Table("account of", "client", box=None, pad_edge=False, header_style="bold")
    most = 3 if width < 120 else None
    for heading in ("memory", "processors", "threads", "descriptors", "log lines")[:most]:
        accounts.add_column(heading, justify="right", no_wrap=True)
    for service in reports:
        who = Text(f"{service['name'] or 'child'} ({service['pid']})")
        table.add_row(who, "", _count(len(service["models"])), *_cells(service, columns), style="bold")
        for model in service["models"]:
            label = Text(model["label"], overflow="fold")  # another process wrote it, so it is not read as markup
            for burst in model["bursts"]:
                table.add_row("", _client(burst), label, *_cells(burst, columns))
            if not model["bursts"]:
                table.add_row("", _client(model), label, *_cells(model, columns), style="dim")
        accounts.add_row(who, "", *_account(service["process"])[:most], style="bold")
        for client in service["clients"]:
            accounts.add_row("", _client(client), *_account(client)[:most])
    return Group(table, "", accounts)


def _account(part: dict[str, Any]) -> list[str]:
    def of(name: str, show: Callable[[int], str] = "{:,}".format) -> str:
        most = part[f"most_{name}"]
        return show(part[name]) + (f" / {show(most)}" if most else "")

    processors, lines = part["most_processors"], part["most_log_lines"]
    return [
        of("bytes", size),
        f"{part['busy']:.2f}" + (f" / {processors}" if processors else ""),
        of("threads"),
        of("fds"),
        f"{part['log_lines']:,}" + (f" ({lines:,} in 10 s)" if lines else ""),
    ]


def _count(models: int) -> str:
    return "1 model" if models == 1 else f"{models} models"


def _cells(part: dict[str, Any], columns: Sequence[int]) -> list[str]:
    counters, queue, run = part["counters"], part["queue_wait"], part["execution"]
    requests = counters["plan_hits"] + counters["plan_misses"]
    cells = (
        f"{part['executions_per_s']:,.0f}",
        f"{part['busy']:.0%}",
        *map(_time, (queue["p50_us"], queue["p99_us"], run["p50_us"], run["p99_us"], run["max_us"])),
        f"{counters['sleeps']:,}",
        _share(counters["plan_hits"], requests),
        f"{counters['failures'] + counters['malformed']:,}",
    )
    return [cells[i] for i in columns]


def _share(hits: int, requests: int) -> str:
    if not requests:
        return ""
    return "100%" if hits == requests else f"{math.floor(hits / requests * 1000) / 10:.1f}%"


def _time(us: float) -> str:
    if not us:
        return ""
    return f"{us:.2f} µs" if us < 100 else f"{us / 1e3:.2f} ms" if us < 1e5 else f"{us / 1e6:.2f} s"


def _client(part: dict[str, Any]) -> Text:
    from rich.text import Text

    pid = part["client_pid"]
    try:
        name = Text(f"{Path(f'/proc/{pid}/comm').read_text(errors='replace').strip()} ({pid})")
    except OSError:
        name = Text(f"({pid})" if pid else "")
    return name.append(" has left", style="bold red") if part["client_has_left"] else name
