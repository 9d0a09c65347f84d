"""`nnburst cache`: list, check and remove the entries of a cache directory."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .targets import size

if TYPE_CHECKING:
    from ..cache import Cache, EntryInfo

_INVALID, _USAGE, _ROOT, _NO_SERVICE = 1, 2, 3, 4
_AGE = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_SIZE = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SORT: dict[str, Callable[[EntryInfo], float]] = {
    "size": lambda info: -info.nbytes,
    "age": lambda info: info.created,
    "hits": lambda info: -info.hits,
}


def _scaled(what: str, units: dict[str, int]) -> Callable[[click.Context, click.Parameter, str | None], float | None]:
    """Return a callback that reads a number with a unit."""

    def read(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
        if value is None:
            return None
        from ..cache import amount

        number = amount(value, units)
        if number is None:
            known = ", ".join(filter(None, units))
            raise click.BadParameter(f"expected a {what}, got {value!r}: a number, with or without one of {known}")
        return number

    return read


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
def _readable(directory: Cache) -> Any:
    from ..cache import CacheRejected

    try:
        yield
    except (CacheRejected, OSError) as error:
        click.echo(f"nnburst cache: the directory cannot be read: {error}", err=True)
        raise SystemExit(_ROOT) from None


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


def _settle(context: click.Context, parameter: click.Parameter, value: Path | None) -> None:
    """Take the directory from the end of the command, where `ls` has it."""
    if value is None:
        return
    from ..cache import Cache

    if context.parent is not None and context.parent.params.get("directory") is not None:
        raise click.UsageError("name the directory once: --dir before the command, or DIR after it")
    context.obj = Cache(value)


_place = click.argument(
    "place", metavar="[DIR]", required=False, default=None, expose_value=False, callback=_settle,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)  # fmt: skip


def _when(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds)) if seconds else "never"


def _worth(row: dict[str, Any]) -> str:
    """Say what compiling took and, once an entry was restored, what a hit saves of it."""
    saves = "never restored" if row["saves_ms"] is None else f"a hit saves {row['saves_ms']:.0f}"
    return f"compiled in {row['compile_ms']:.0f} ms, {saves}"


@cache.command("ls")
@_place
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.option("--device", help="Only entries of this device.")
@click.option("--sort", type=click.Choice(sorted(_SORT)), default="age", show_default=True)
@click.option("--stale", is_flag=True, help="Only entries of builds of devices that are not here.")
@click.pass_obj
def ls(directory: Cache, as_json: bool, device: str | None, sort: str, stale: bool) -> None:
    """List the entries as their headers describe them. Needs no service."""
    with _readable(directory):
        known = {key for key, _ in directory.index.all()}
        infos = directory.entries()
    epochs = _epochs()
    rows = []
    for info in sorted(infos, key=_SORT[sort]):
        old = epochs.get(info.device) not in (None, info.epoch)
        if (device is None or info.device == device) and (old or not stale):
            rows.append({name: getattr(info, name) for name in info.__struct_fields__} | {
                "saves_ms": info.saves_ms if info.last_hit else None, "stale": old, "indexed": info.entry in known,
            })  # fmt: skip
    total = sum(row["nbytes"] for row in rows)
    if as_json:
        click.echo(json.dumps({"path": directory.path, "entries": rows, "bytes": total}, indent=1))
        return
    for row in rows:
        shown = (("*", row["pinned"]), ("!", row["stale"]), ("?", not row["indexed"]))
        marks = "".join(mark for mark, on in shown if on)
        click.echo(
            f"{row['entry'][:12]}{marks:3} {row['device']:24} {row['files']:2} files {size(row['nbytes']):>10}  "
            f"created {_when(row['created'])}  last hit {_when(row['last_hit'])}  hits {row['hits']:5}  "
            f"{_worth(row)}  {row['version']}"
        )
    limit = directory.limits
    click.echo(
        f"{len(rows)} entries, {size(total)} of {size(limit.max_bytes)}   (* pinned, ! stale, ? not in the index)"
    )


@cache.command()
@click.option("--quick", is_flag=True, help="Only names, modes, headers and lengths.")
@click.option("--fix", is_flag=True, help="Remove entries that are not good.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.argument("ids", nargs=-1)
@click.pass_obj
def verify(directory: Cache, quick: bool, fix: bool, as_json: bool, ids: tuple[str, ...]) -> None:
    """Check entries: all, or those whose names begin with IDS.

    Without --quick each entry is checked as the devices would check it, with the key and the trust store of this user.
    A service under another user has its own: then only --quick tells anything here.
    """
    from ..cache import CacheReason, CacheRejected, TrustStore, check_entry

    with _readable(directory):
        infos = directory.entries() if not ids else [info for prefix in ids for info in directory.find(prefix)]
    if ids and not infos:
        raise click.UsageError(f"no entry begins with {', '.join(ids)}; nnburst cache ls shows them")
    store, no_store = None, ""
    if not quick:
        try:
            store = TrustStore()
        except CacheRejected as error:
            no_store = str(error)
    epochs, bad = _epochs(), 0
    rows: list[dict[str, str]] = []
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
        rows.append({"entry": info.entry, "device": info.device, "verdict": verdict})
    if store is not None:
        store.close()
    if as_json:
        click.echo(json.dumps({"entries": rows, "bad": bad}, indent=1))
    else:
        for row in rows:
            click.echo(f"{row['entry'][:12]} {row['device']:24} {row['verdict']}")
        click.echo(f"{len(infos)} entries, {bad} not good")
    if bad:
        raise SystemExit(_INVALID)
    if no_store:
        click.echo(f"only headers and lengths were checked: {no_store}", err=True)
        raise SystemExit(_NO_SERVICE)


@cache.command("prune")
@_place
@click.option("--max-bytes", callback=_scaled("size", _SIZE), help="Entries until that much is left, e.g. 500M.")
@click.option("--max-age", callback=_scaled("age", _AGE), help="Entries that were not used for that long, e.g. 30d.")
@click.option("--stale", is_flag=True, help="Entries of builds of devices that are not here.")
@click.option("--orphans", is_flag=True, help="Leftovers of saves that were cut off.")
@click.option("--all", "everything", is_flag=True, help="Everything.")
@click.option("--force", is_flag=True, help="Pinned entries, too.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.pass_obj
def prune_command(
    directory: Cache,
    max_bytes: float | None,
    max_age: float | None,
    stale: bool,
    orphans: bool,
    everything: bool,
    force: bool,
    dry_run: bool,
) -> None:
    """Remove entries. Without options: what a save would remove to keep within the limits."""
    from ..cache import prune

    only_orphans = orphans and max_bytes is None and max_age is None and not stale and not everything
    with _readable(directory):
        done = prune(
            directory,
            max_bytes=(1 << 62) if only_orphans else None if max_bytes is None else int(max_bytes),
            max_age=0 if only_orphans else max_age,
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


@cache.command()
@_place
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.pass_obj
def stats(directory: Cache, as_json: bool) -> None:
    """Count outcomes by reason since the index was made."""
    counters = directory.stats()
    if as_json:
        click.echo(json.dumps(counters, indent=1, sort_keys=True))
        return
    for reason, count in sorted(counters.items(), key=lambda item: -item[1]):
        click.echo(f"{count:8} {reason}")
    if not counters:
        click.echo("nothing was counted yet")


def _pin(directory: Cache, ids: tuple[str, ...], pinned: bool) -> None:
    with _readable(directory):
        found = {prefix: directory.find(prefix) for prefix in ids}
    missing = [prefix for prefix, infos in found.items() if not infos]
    if missing:
        raise click.UsageError(f"no entry begins with {', '.join(missing)}; nnburst cache ls shows them")
    with _readable(directory):
        count = directory.pin({info.entry for infos in found.values() for info in infos}, pinned)
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
@_place
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.pass_obj
def path(directory: Cache, as_json: bool) -> None:
    """Say where compilations are kept, and where a service of this user keeps its key and trust store."""
    from ..cache import default_state_directory

    with _readable(directory):
        places = {"cache": str(directory.path), "state": str(default_state_directory())}
    if as_json:
        click.echo(json.dumps(places, indent=1))
    else:
        click.echo("\n".join(f"{what} {place}" for what, place in places.items()))
