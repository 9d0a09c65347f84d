"""`nnburst cache`: list and remove the entries of a cache directory."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec.structs import asdict

from .targets import size

if TYPE_CHECKING:
    from ..cache.directory import Cache

_IN_USE, _ROOT = 1, 3


def _bytes(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    from ..cache.directory import amount

    number = None if value is None else amount(value)
    if value is not None and number is None:
        raise click.BadParameter(f"expected a size, got {value!r}: a number, with or without one of k, m, g, t")
    return number


@click.group()
@click.option(
    "--dir", "directory", type=click.Path(exists=True, file_okay=False, path_type=Path), default=None,
    help="The cache directory, which must exist [default: NNBURST_CACHE_DIR, else the user's cache].",
)  # fmt: skip
@click.pass_context
def cache(context: click.Context, directory: Path | None) -> None:
    """Show and remove compiled models that are cached in files."""
    from ..cache.directory import Cache

    context.obj = Cache(directory)


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    from ..cache.reasons import CacheRejected

    try:
        yield
    except (CacheRejected, OSError) as error:
        click.echo(f"nnburst cache: the directory cannot be read: {error}", err=True)
        raise SystemExit(_ROOT) from None


@cache.command("ls")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_obj
def ls(directory: Cache, as_json: bool) -> None:
    """List the cache entries, the least recently used first."""
    with _readable():
        infos = sorted(directory.entries(), key=lambda info: info.used)
    total = sum(info.nbytes for info in infos)
    if as_json:
        rows = [asdict(info) for info in infos]
        click.echo(json.dumps({"path": directory.path, "entries": rows, "bytes": total}, indent=1))
        return
    for info in infos:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(info.used))
        click.echo(f"{info.entry[:12]} {size(info.nbytes):>10}  used {used}")
    click.echo(f"{len(infos)} entries, {size(total)} of {size(directory.limits.max_bytes)}")


@cache.command("prune")
@click.option(
    "--max-bytes", metavar="SIZE", callback=_bytes, help="Remove entries until at most SIZE, e.g. 500M, is in use."
)
@click.option("--all", "everything", is_flag=True, help="Remove all cache entries.")
@click.pass_obj
def prune_command(directory: Cache, max_bytes: int | None, everything: bool) -> None:
    """Remove cache entries, the least recently used first. Entries in use stay.

    Without options, removes cache entries beyond the directory's limits.
    """
    with _readable():
        done = directory.prune(0 if everything else max_bytes)
    click.echo(f"{done.entries} entries removed, {size(done.nbytes)}")
    if done.busy:
        click.echo(f"{done.busy} entries are in use and stay")
        raise SystemExit(_IN_USE)


@cache.command()
@click.pass_obj
def path(directory: Cache) -> None:
    """Print the cache directory and the state directory."""
    from ..cache.files import default_state_directory

    with _readable():
        click.echo(f"cache {directory.path}\nstate {default_state_directory()}")
