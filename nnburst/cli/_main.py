"""The `nnburst` command group and its table of subcommands."""

from __future__ import annotations

import importlib
import io
import os
import sys
from typing import Any, NamedTuple

import click

from .._version import VERSION
from ..errors import NNBurstError


class CommandRow(NamedTuple):
    """A command's module, and the command's line in the help of `nnburst`."""

    module: str
    help: str


COMMANDS: dict[str, CommandRow] = {
    "bench": CommandRow("nnburst.cli.bench.command", "Measure latencies of bursts, or of a model in several ways."),
    "cache": CommandRow("nnburst.cli.cache", "Show and remove compiled models that are cached in files."),
    "demo": CommandRow("nnburst.cli.demo.command", "Classify real handwritten digits in an isolated service process."),
    "kick": CommandRow("nnburst.cli.serve.control", "End the connections and runs of a client of a shared service."),
    "ls": CommandRow("nnburst.cli.serve.control", "List the shared services that this user can connect to."),
    "run": CommandRow("nnburst.cli.run.command", "Run a model file in a service process, once or for many inputs."),
    "doctor": CommandRow("nnburst.cli.doctor", "Check this machine, the devices and the extras."),
    "serve": CommandRow("nnburst.cli.serve.command", "Run a service that programs of this machine share."),
    "stop": CommandRow("nnburst.cli.serve.control", "Stop a shared service."),
    "trace": CommandRow("nnburst.cli.trace", "Run a program and record its executions for Perfetto."),
    "top": CommandRow("nnburst.cli.top", "Show running services, their models and their use of resources."),
}


class _LazyGroup(click.Group):
    """Command group that imports commands when they run, and prints their errors as sentences."""

    def main(self, *args: Any, **options: Any) -> Any:
        try:
            return super().main(*args, **options)
        except OSError as error:
            sys.stdout = io.StringIO()  # Python must not flush the closed pipe at exit
            click.echo(f"Error: the system refuses what this command needs: {error}", err=True)
            sys.exit(1)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except NNBurstError as error:
            raise click.ClickException(f"{type(error).__name__}: {error}") from error

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        row = COMMANDS.get(cmd_name)
        if row is None:
            return None
        command = getattr(importlib.import_module(row.module), cmd_name)
        assert isinstance(command, click.Command), f"{row.module}.{cmd_name} is not a click command"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name].help) for name in self.list_commands(ctx)])


# Of `commands`, click reads only the names; `get_command` imports the command.
@click.group(cls=_LazyGroup, commands=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, message="nnburst %(version)s", help="Show the version.")
def main() -> None:
    """Run neural networks in another process as if they were functions."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # `bench` and `cache` load ONNX Runtime here
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a question mark replaces a character that the terminal lacks
