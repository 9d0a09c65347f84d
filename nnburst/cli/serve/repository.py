"""The files of a shared service's named models."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ...errors import InvalidArgument, NNBurstError, error_for
from ...memory.memory import Memory
from ...runtime.compile.model_files import SUFFIXES, import_model, is_name
from ...service.client.connection import ServiceConnection
from ..progress import call_with_notice

_log = logging.getLogger(__name__)
_PIECE = 4 << 20


class Batching(NamedTuple):
    """The maximum number of batch rows in one run, and the most seconds that a request waits for other requests."""

    rows: int = 1
    wait: float = 0.0


class Repository:
    """The model files of a shared service, to be loaded into the service's worker process.

    Args:
        files: Paths of model files, by name of the model.
        directory: A directory of ``NAME/VERSION/FILE``, served as ``NAME:VERSION``; versions are whole numbers. Each
            load reads the directory. None for no directory.
        batching: Batching by name of the model, without version; "" means all other models.

    Raises:
        InvalidArgument: The directory does not exist, a version does not have exactly one file that a device can read,
            or a name ends with the suffix of a model file.
    """

    def __init__(
        self, files: Mapping[str, str], directory: str | None = None, batching: Mapping[str, Batching] = {}
    ) -> None:
        self._files, self._directory, self._batching = files, directory, batching
        self._unloaded: set[str] = set()
        self._was_prepared = False
        for name in map(_base, self._find_files()):
            if not is_name(name):
                raise InvalidArgument(
                    f"sessions take {name!r} for a file; call the model {os.path.splitext(name)[0]!r}"
                )

    @property
    def unloaded(self) -> list[str]:
        return sorted(self._unloaded)

    @property
    def is_empty(self) -> bool:
        return not self._files and self._directory is None

    def prepare(self, worker: ServiceConnection) -> None:
        """Load all models into a new worker process.

        Raises:
            NNBurstError: A model cannot be loaded into the first worker. After a restart, the error is only logged.
        """
        if both := sorted(self._files.keys() & worker.list_models().keys()):
            raise InvalidArgument(f"--model {both[0]}: a function has that name, too")
        if self._was_prepared:
            self.change(worker, None, unload=False)
            return
        for name, file in self._find_files().items():
            self._publish(worker, name, file)
        self._was_prepared = True

    def change(self, worker: ServiceConnection, name: str | None, unload: bool) -> None:
        """Reload all versions of a model from their files, or unload them. Without a name, reload all loaded models.

        Raises:
            InvalidArgument: The model is unknown.
            NNBurstError: A version cannot be loaded, and stays as before. Without a name, the error is only logged.
        """
        found, served = self._find_files(), worker.list_models()
        if name is not None:
            if name not in map(_base, [*found, *served]):
                raise InvalidArgument(
                    f"there are no files of a model {name!r}; there are {sorted(set(map(_base, found)))}"
                )
            self._unloaded.discard(name)
            self._unloaded |= {name} if unload else set()
        for each in [each for each in served if _base(each) in self._unloaded or self._is_removed(each, found)]:
            worker.withdraw(each)
        for each, file in found.items():
            if _base(each) not in self._unloaded and name in (None, _base(each)):
                try:
                    self._publish(worker, each, file)
                except NNBurstError as error:
                    if name is not None:
                        raise
                    if worker.alive:  # if the worker died, a new one loads the models again
                        _log.error("%s; what was served is served as before", error)
        if name is None:
            _log.info("the models were loaded again")

    def _is_removed(self, name: str, found: Mapping[str, str]) -> bool:
        return name not in found and ":" in name

    def _find_files(self) -> dict[str, str]:
        found = dict(self._files)
        if self._directory is None:
            return found
        try:
            for model in _directories(self._directory):
                for version in _directories(model.path):
                    if version.name.isdecimal():
                        found[f"{model.name}:{version.name}"] = _model_in(version.path)
        except OSError as error:
            raise InvalidArgument(f"--models {self._directory} cannot be read: {error}") from None
        return found

    def _publish(self, worker: ServiceConnection, name: str, file: str) -> None:
        """Make the worker compile a model, unless the worker already serves this file."""
        try:
            with import_model(worker, None, file) as (device, found):
                hashed = hashlib.sha256()
                for pool in found.model.pools:
                    assert isinstance(pool, Memory)
                    for start in range(0, pool.size, _PIECE):  # read() copies: a shrinking file must not cause SIGBUS
                        hashed.update(pool.read("u1", (min(_PIECE, pool.size - start),), start).data)
                digest = hashed.hexdigest()
                if worker.list_models().get(name) != digest:
                    batching = self._batching.get(_base(name)) or self._batching.get("", Batching())
                    call_with_notice(f"compiling {file}", worker.publish, name, device, found, digest, *batching)
                    _log.info("model %s: %s was loaded", name, file)
        except NNBurstError as error:
            raise error_for(error.status, f"model {name} of {file}: {error}") from error


def _base(name: str) -> str:
    return name.partition(":")[0]


def _directories(path: str) -> Sequence[os.DirEntry[str]]:
    with os.scandir(path) as entries:
        return [entry for entry in entries if entry.is_dir() and not entry.name.startswith(".")]


def _model_in(version: str) -> str:
    files = sorted(str(path) for path in Path(version).iterdir() if path.suffix in SUFFIXES)
    if len(files) != 1:
        kinds = ", ".join(SUFFIXES)
        raise InvalidArgument(f"{version} has {len(files)} models ({kinds}); a version is a directory with one")
    return files[0]
