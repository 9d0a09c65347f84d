"""The messages of preparing a model: compiled, or restored from cache files."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ...devices import CacheFiles, CompileJob
from .values import Id, Message, Name, Text, Unsigned64, Value, WireModel

Bytes32 = Annotated[bytes, msgspec.Meta(max_length=32)]
"""32 bytes, or none."""
Generation = Annotated[bytes, msgspec.Meta(max_length=16)]


class CacheOutcome(Value, frozen=True):
    """A `SaveResult`."""

    saved: bool
    reason: Name
    generation: Generation
    nbytes: Unsigned64
    seconds: float


class PrepareModel(Message, tag="prepare_model", frozen=True):
    """Compiles a model. Descriptors: of the pools, the model cache files, the data cache files, their directory."""

    device: Id
    model: WireModel
    job: CompileJob


class PrepareModelReply(Message, tag="prepare_model.reply", frozen=True, omit_defaults=True):
    """`takes_steps`: a slot of its bursts may be a number of steps."""

    prepared_model: Id
    cache: CacheOutcome | None = None
    takes_steps: bool = False


class PrepareModelFromCache(Message, tag="prepare_model_from_cache", frozen=True):
    """Restores a model. Descriptors: the model cache files, the data cache files, and their directory."""

    device: Id
    cache: CacheFiles
    deadline_ns: Unsigned64 = 0


class PrepareModelFromCacheReply(Message, tag="prepare_model_from_cache.reply", frozen=True, omit_defaults=True):
    """Either a model, or why the files were not accepted."""

    prepared_model: Id | None
    reason: Name = ""
    status: Annotated[int, msgspec.Meta(ge=0, le=8)] = 0
    message: Text = ""
    takes_steps: bool = False


class ConfirmCache(Message, tag="confirm_cache", frozen=True):
    """Says that a saved entry has been published."""

    device: Id
    token: Bytes32
    generation: Generation


class ConfirmCacheReply(Message, tag="confirm_cache.reply", frozen=True):
    known: bool


class GetDeviceCounters(Message, tag="get_device_counters", frozen=True):
    """Reads a device's counters."""

    device: Id


class GetDeviceCountersReply(Message, tag="get_device_counters.reply", frozen=True):
    counters: Annotated[dict[Name, Unsigned64], msgspec.Meta(max_length=256)]
