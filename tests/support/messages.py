"""A request and a reply for each call of the control plane, in the order of docs/WIRE.md, which shows them."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from nnburst.cache.reasons import CacheReason, SaveResult
from nnburst.devices.interfaces import CacheFiles, CompileJob
from nnburst.errors import OutputShape
from nnburst.model import Capabilities, ExecutionPreference, Operation, Priority, RunOptions, Timing
from nnburst.model.extensions import ModelMetadata
from nnburst.model.types import (
    BufferRole,
    DataLocation,
    DeviceStatus,
    DeviceType,
    Lifetime,
    MeasureTiming,
    OperandDesc,
    RequestArgument,
    Subgraph,
    SymmPerChannelQuantParams,
)
from nnburst.service.wire import protocol

GRAPH = Subgraph(
    operands=(
        OperandDesc(3, (1, 2, 2, 1), 1, 0.5, 3, Lifetime.SUBGRAPH_INPUT),
        OperandDesc(11, (2,), 1, extra_params=SymmPerChannelQuantParams((0.5, 0.25), 0)),
        OperandDesc(0x10001, (), extra_params=b"extension", location=DataLocation(1, 2, 3)),
    ),
    operations=(Operation(0, (0, 1), (2,)),),
    input_indexes=(0,),
    output_indexes=(2,),
)
POOL = protocol.WireMemory("ashmem", 4096, 3, 0)
X = OperandDesc(3, (4,), 1, lifetime=Lifetime.SUBGRAPH_INPUT)
SMALL = protocol.WireModel(Subgraph((X,), (), (0,), (0,)), (), b"", (), False, {}, ("x",), ("x",))
METADATA = ModelMetadata(2, {"labels": "cat,dog"}, "pytorch", "main", "", "", "")
POOLED = msgspec.structs.replace(SMALL, pools=(POOL,))
CACHE_FILES = CacheFiles((0,), (1, 2), bytes(32), bytes(32))
MODEL = protocol.WireModel(
    GRAPH, (msgspec.Raw(msgspec.msgpack.encode(GRAPH)),), b"const", (POOL,), True, {"org.nnburst": 1}, ("x",), ("y",)
)
REQUEST = protocol.WireRequest(
    (RequestArgument(False, DataLocation(0, 0, 16), (1, 2)),), (RequestArgument(has_no_value=True),), (POOL, POOL)
)
REGIONS = ((0, 8), (128, 8), (384, 1024 * 24), (256, 4), (136, 48))
QUEUE = protocol.WireQueue(tuple(protocol.WireGrantor(0, 0, *region) for region in REGIONS), 24, 1, 1)
SHAPES = (OutputShape((1, 2)), OutputShape((0,), False))

SAMPLES = (
    (protocol.Hello((1, 0), 7, own=True), protocol.HelloReply((1, 0), 8)),
    (
        protocol.ListDevices(),
        protocol.ListDevicesReply((protocol.DeviceInfo("a-b", "1", DeviceType.GPU, Capabilities(), (1, 2)),), (0,)),
    ),
    (protocol.ListModels(), protocol.ListModelsReply(("detector", "ü"), ("", 64 * "0"))),
    (protocol.GetDeviceStatus(0), protocol.GetDeviceStatusReply(DeviceStatus.BUSY)),
    (protocol.GetSupportedOperations(0, MODEL), protocol.GetSupportedOperationsReply((True, False))),
    (
        protocol.ImportModel(0, "name:detector", (POOL,)),
        protocol.ImportModelReply(SMALL, ("", "weights.bin"), (("batch", None, 4), None), ((),), 1, METADATA),
    ),
    (
        protocol.PrepareModel(
            1, POOLED, CompileJob(ExecutionPreference.LOW_POWER, Priority.HIGH, 2**64 - 1, CACHE_FILES)
        ),
        protocol.PrepareModelReply(1, SaveResult(True, CacheReason.SAVED, bytes(16), 5, 0.5)),
    ),
    (protocol.PrepareModelFromCache(1, CACHE_FILES, 7), protocol.PrepareModelReply(1, takes_steps=True)),
    (protocol.ConfirmCache(1, bytes(32), bytes(16)), protocol.ConfirmCacheReply(True)),
    (
        protocol.Execute(1, REQUEST, RunOptions(MeasureTiming.YES, 5, 6)),
        protocol.ExecuteReply(3, SHAPES, Timing(), "too small"),
    ),
    (protocol.ExecuteFenced(1, REQUEST, RunOptions(MeasureTiming.YES, 5, 6), 3, 7), protocol.ExecuteFencedReply(4)),
    (protocol.GetFencedInfo(4), protocol.GetFencedInfoReply(2, Timing(1, 2), Timing(), "no")),
    (protocol.CancelFenced(4), protocol.Done()),
    (protocol.ConfigureBurst(1, 2, QUEUE, QUEUE, 0.5), protocol.ConfigureBurstReply(3)),
    (protocol.GetMemories(2, (0, -1, 2**31 - 1)), protocol.GetMemoriesReply(0, (POOL,))),
    (protocol.FailureReason(3), protocol.FailureReasonReply("no such frame")),
    (protocol.EndNotice("the client takes no results", 3), protocol.Done()),
    (protocol.FreeMemory(3, -(2**31)), protocol.Done()),
    (
        protocol.Allocate(0, (1, 0), (4, 5), (BufferRole(0, 1, 0.5),), (BufferRole(1, 0),)),
        protocol.AllocateReply(6, 2**31 - 1),
    ),
    (protocol.CopyTo(6, POOL), protocol.CopyToReply(2**64 - 1)),
    (protocol.CopyFrom(6, POOL, (2, 3)), protocol.Done()),
    (protocol.CopyBuffer(6, 7), protocol.Done()),
    (protocol.EndClients(uid=1000), protocol.EndClientsReply(2)),
    (protocol.TakeClient(3, has_pidfd=True), protocol.Done()),
    (
        protocol.PublishModel("detector", 1, POOLED, (("batch", None, 4), None), ((),), 1, 64 * "0", 32, 0.001),
        protocol.Done(),
    ),
    (protocol.WithdrawModel("detector:1"), protocol.Done()),
    (protocol.LoadModel("detector", unload=True), protocol.Done()),
    (protocol.ClientGone(3, "no thread"), protocol.Done()),
    (protocol.Release(3), protocol.Done()),
    (protocol.Goodbye(), protocol.Done()),
)
ERROR = protocol.ErrorReply(4, "there is no model 'x'")


def shown(value: Any) -> str:
    """Return decoded MessagePack as text: JSON, and bytes as h'…' in hexadecimal."""
    if isinstance(value, bytes):
        return f"h'{value.hex()}'"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{shown(key)}: {shown(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(shown, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
