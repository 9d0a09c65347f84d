"""`nnburst trace`: runs a program and records its executions."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import click

__all__ = ["trace"]


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE",
    help="The trace; JSON for Perfetto and Chrome.",
)
@click.option(
    "--every",
    type=click.IntRange(1, 2**31 - 1),
    default=1,
    show_default=True,
    metavar="N",
    help="Record each N-th run of a burst: less to look at, and less that recording costs.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND...")
def trace(output: Path, every: int, command: tuple[str, ...]) -> None:
    """Run COMMAND and record the executions of it and of its children.

    \b
    nnburst trace -o trace.json python program.py
    # then open trace.json at https://ui.perfetto.dev

    The last 65,536 runs of each burst are kept. The status is that of COMMAND.
    """
    from ..watch.trace import EVERY_VARIABLE, FILE_VARIABLE, adopt, begin

    if shutil.which(command[0]) is None:
        raise click.ClickException(f"{command[0]} cannot be run: there is no such program")
    begin(str(output))
    env = {**os.environ, FILE_VARIABLE: str(output.absolute()), EVERY_VARIABLE: str(every)}
    adopt(env)
    try:
        process = subprocess.Popen(command, env=env)
    except OSError as error:
        raise click.ClickException(f"{command[0]} cannot be run: {error.strerror}") from error
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command decides what Ctrl-C ends
    try:
        status = process.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        events = json.loads(output.read_bytes())["traceEvents"]
    except (OSError, ValueError, LookupError, TypeError):
        raise click.ClickException(f"{output} is no trace: it cannot keep one, or the command has changed it") from None
    runs = [event for event in events if event["ph"] == "X" and event["name"] == "run"]
    processes = len({run["pid"] for run in runs})
    count = f"{len(runs):,} run{'s' * (len(runs) != 1)} of {processes} process{'es' * (processes != 1)}"
    what = f"{count}; open it at https://ui.perfetto.dev" if runs else "the command has run no model through nnburst"
    click.echo(f"{output}: {what}", err=True)
    sys.exit(status if status >= 0 else 128 - status)
