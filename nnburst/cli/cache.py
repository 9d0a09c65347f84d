"""`nnburst cache`: list, check and remove the entries of a cache directory."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec.structs import asdict

from ..cache.limits import SIZES, amount
from .targets import size

if TYPE_CHECKING:
    from ..cache import Cache, EntryInfo

_INVALID, _ROOT, _NO_SERVICE = 1, 3, 4
_AGE = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


class _Amount(click.ParamType):  # type: ignore[type-arg]
    """A number with a unit."""

    def __init__(self, name: str, units: dict[str, int]) -> None:
        self.name, self._units = name, units

    def convert(self, value: str, parameter: click.Parameter | None, context: click.Context | None) -> float:
        number = amount(value, self._units)
        if number is None:
            known = ", ".join(filter(None, self._units))
            self.fail(f"expected a {self.name}, got {value!r}: a number, with or without one of {known}")
        return number


@click.group()
@click.option(
    "--dir", "directory", type=click.Path(exists=True, file_okay=False, path_type=Path), default=None,
    help="The cache directory, which exists [default: NNBURST_CACHE_DIR, else the user's cache].",
)  # fmt: skip
@click.pass_context
def cache(context: click.Context, directory: Path | None) -> None:
    """Look after compilations that are kept in files.

    No command harms a running program: entries in use are left alone, and a removed entry is
    compiled again when it is needed.
    """
    from ..cache import Cache

    context.obj = Cache(directory)


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    from ..cache import CacheRejected

    try:
        yield
    except (CacheRejected, OSError) as error:
        click.echo(f"nnburst cache: the directory cannot be read: {error}", err=True)
        raise SystemExit(_ROOT) from None


def _found(directory: Cache, ids: tuple[str, ...]) -> list[EntryInfo]:
    """Return the entries whose names begin with each of `ids`."""
    with _readable():
        found = {prefix: directory.find(prefix) for prefix in ids}
    if missing := [prefix for prefix, infos in found.items() if not infos]:
        raise click.UsageError(f"no entry begins with {', '.join(missing)}; nnburst cache ls shows them")
    return [info for infos in found.values() for info in infos]


def _epochs() -> dict[str, str]:
    """Hex epochs of the devices that are here."""
    from ..devices import create_device, device_names

    found = {}
    for name in device_names():
        with contextlib.suppress(Exception):  # a device whose extra is missing
            device = create_device(name)
            found[name] = device.cache_epoch.hex()
            device.close()
    return found


def _when(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


@cache.command("ls")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.pass_obj
def ls(directory: Cache, as_json: bool) -> None:
    """List the entries as their files describe them, the oldest first. Needs no service."""
    with _readable():
        infos = sorted(directory.entries(), key=lambda info: info.created)
    epochs = _epochs()
    rows = [{**asdict(info), "stale": epochs.get(info.device) not in (None, info.epoch)} for info in infos]
    total = sum(info.nbytes for info in infos)
    if as_json:
        click.echo(json.dumps({"path": directory.path, "entries": rows, "bytes": total}, indent=1))
        return
    for row in rows:
        marks = ("*" if row["pinned"] else "") + ("!" if row["stale"] else "")
        click.echo(
            f"{row['entry'][:12]}{marks:2} {row['device']:24} {row['files']:2} files {size(row['nbytes']):>10}  "
            f"created {_when(row['created'])}  used {_when(row['used'])}  "
            f"compiled in {row['compile_ms']:.0f} ms  {row['version']}"
        )
    click.echo(f"{len(rows)} entries, {size(total)} of {size(directory.limits.max_bytes)}   (* pinned, ! stale)")


@cache.command()
@click.option("--quick", is_flag=True, help="Only names, modes, headers and lengths.")
@click.option("--fix", is_flag=True, help="Remove entries that are not good.")
@click.argument("ids", nargs=-1)
@click.pass_obj
def verify(directory: Cache, quick: bool, fix: bool, ids: tuple[str, ...]) -> None:
    """Check entries: all, or those whose names begin with IDS.

    Without --quick each entry is checked as the devices would check it, with the key and the trust store of this user.
    A service under another user has its own: then only --quick tells anything here.
    """
    from ..cache import CacheReason, CacheRejected, TrustStore, check_entry

    with _readable():
        infos = _found(directory, ids) if ids else directory.entries()
    store, no_store = None, ""
    if not quick:
        try:
            store = TrustStore()
        except CacheRejected as error:
            no_store = str(error)
    epochs, bad = _epochs(), 0
    for info in infos:
        try:
            with contextlib.closing(directory.files_of(info)) as opened:
                check_entry(store, epochs, info, [*opened.model_fds, *opened.data_fds])
            verdict = "ok" if store is not None else "ok (headers and lengths only)"
        except (CacheRejected, OSError) as error:
            reason = error.reason if isinstance(error, CacheRejected) else CacheReason.IO_ERROR
            verdict = reason.value
            if reason is CacheReason.BUSY:
                verdict += ", not checked"
            else:
                bad += 1
                if fix:
                    verdict += ", removed" if directory.remove(info.entry, info.generation) >= 0 else ", in use"
        click.echo(f"{info.entry[:12]} {info.device:24} {verdict}")
    click.echo(f"{len(infos)} entries, {bad} not good")
    if bad:
        raise SystemExit(_INVALID)
    if no_store:
        click.echo(f"only headers and lengths were checked: {no_store}", err=True)
        raise SystemExit(_NO_SERVICE)


@cache.command("prune")
@click.option("--max-bytes", type=_Amount("size", SIZES), help="Entries until that much is left, e.g. 500M.")
@click.option("--max-age", type=_Amount("age", _AGE), help="Entries that were not used for that long, e.g. 30d.")
@click.option("--stale", is_flag=True, help="Entries of builds of devices that are not here.")
@click.option("--all", "everything", is_flag=True, help="Everything.")
@click.option("--force", is_flag=True, help="Pinned entries, too.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.pass_obj
def prune_command(
    directory: Cache,
    max_bytes: float | None,
    max_age: float | None,
    stale: bool,
    everything: bool,
    force: bool,
    dry_run: bool,
) -> None:
    """Remove entries. Without options: what a save would remove to keep within the limits."""
    from ..cache import prune

    with _readable():
        done = prune(
            directory,
            max_bytes=None if max_bytes is None else int(max_bytes),
            max_age=max_age,
            epochs=_epochs() if stale else None,
            everything=everything,
            force=force,
            dry_run=dry_run,
        )
    for kind, count in sorted(done.entries.items()):
        click.echo(f"{kind}: {count} entries, {size(done.nbytes[kind])}{' would go' if dry_run else ''}")
    if not done.entries:
        click.echo("nothing to remove")
    if done.busy:
        click.echo(f"{done.busy} entries are in use and stay")
        raise SystemExit(_INVALID)


def _pin(directory: Cache, ids: tuple[str, ...], pinned: bool) -> None:
    entries = {info.entry for info in _found(directory, ids)}
    with _readable():
        count = directory.pin(entries, pinned)
    click.echo(f"{count} entries {'pinned' if pinned else 'unpinned'}")


@cache.command()
@click.argument("ids", nargs=-1, required=True)
@click.pass_obj
def pin(directory: Cache, ids: tuple[str, ...]) -> None:
    """Keep entries from being evicted."""
    _pin(directory, ids, True)


@cache.command()
@click.argument("ids", nargs=-1, required=True)
@click.pass_obj
def unpin(directory: Cache, ids: tuple[str, ...]) -> None:
    """Undo pin."""
    _pin(directory, ids, False)


@cache.command()
@click.pass_obj
def path(directory: Cache) -> None:
    """Say where compilations are kept, and where a service of this user keeps its key and trust store."""
    from ..cache import default_state_directory

    with _readable():
        click.echo(f"cache {directory.path}\nstate {default_state_directory()}")
