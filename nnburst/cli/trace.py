"""`nnburst trace`: run a program and record its executions."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import click


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE",
    help="File of the trace, JSON for Perfetto and Chrome.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND...")
def trace(output: Path, command: tuple[str, ...]) -> None:
    """Run COMMAND and record its executions and those of its children.

    \b
    nnburst trace -o trace.json python program.py
    # then open trace.json at https://ui.perfetto.dev

    The trace keeps the last 65,536 runs of each burst. Exits with the status of COMMAND.
    """
    from ..watch.trace import FILE_VARIABLE, adopt, begin

    if shutil.which(command[0]) is None:
        raise click.ClickException(f"{command[0]} cannot be run: there is no such program")
    begin(str(output))
    empty = output.stat().st_size
    env = {**os.environ, FILE_VARIABLE: str(output.absolute())}
    adopt(env)
    process = subprocess.Popen(command, env=env)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # COMMAND handles Ctrl-C
    try:
        status = process.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    has_runs = output.stat().st_size > empty
    what = "open it at https://ui.perfetto.dev" if has_runs else "the command has run no model through nnburst"
    click.echo(f"{output}: {what}", err=True)
    sys.exit(status if status >= 0 else 128 - status)
