"""The calls of the control plane, in the table `CALLS`.

A message is a msgspec struct, encoded as MessagePack and tagged with its name. A new call needs two structs and one
row. Decoding is strict: an unknown name or field, a wrong type, or a count beyond the limits below raises `Malformed`,
which ends the connection.

A message contains no tensors except constants of at most 128 bytes, in `WireModel.operand_values`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar, Union

import msgspec
import numpy as np
from msgspec import Struct

from ..._core._nnburst import lib
from ...cache.reasons import CacheReason, CacheRejected, SaveResult
from ...devices.described import DeviceInfo
from ...devices.interfaces import CacheFiles, CompileJob
from ...errors import ErrorStatus, GeneralFailure, InvalidArgument, NNBurstError, OutputShape, error_for
from ...memory.image import ImageLayout
from ...model.extensions import ModelMetadata
from ...model.running import RunOptions, failure_of
from ...model.types import MAX_OPERANDS, BufferRole, DeviceStatus, RequestArgument, Steps, Subgraph, Timing

VERSION = (1, 0)
"""Version of this table. A peer with another version is refused at hello."""

T = TypeVar("T")
_MAX_TEXT = 4096


class Malformed(Exception):
    """The peer broke the protocol. This ends the connection, not the process."""


class Side(enum.Enum):
    """The side that serves a call. The broker of a shared service serves only the first call of a connection."""

    SERVICE = "service"
    CLIENT = "client"
    BROKER = "broker"


# -- values and limits -------------------------------------------------------------------------------------------------

MAX_FDS = 253
"""Descriptors per message (SCM_MAX_FD of Linux)."""
MAX_INLINE = 64 * 1024
"""Longest body in a datagram, in bytes; a longer body is sent in a sealed memfd."""
MAX_BODY = 16 * 1024 * 1024
"""Longest body of a message, in bytes."""
MAX_REFERENCED = 1024
"""Maximum number of subgraphs of a model. In all, they have at most `MAX_OPERANDS` operands, and as many operations."""

Id = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Cpus = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, le=2**20)], ...], msgspec.Meta(max_length=8192)]
Unsigned64 = Annotated[int, msgspec.Meta(ge=0)]  # MessagePack ends at 2**64 - 1
ArgumentName = Annotated[str, msgspec.Meta(max_length=4096)]
OpenShapes = Annotated[
    tuple[Annotated[tuple[Id | ArgumentName | None, ...], msgspec.Meta(max_length=64)] | None, ...],
    msgspec.Meta(max_length=MAX_OPERANDS),
]
Slot = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Name = Annotated[str, msgspec.Meta(max_length=256)]
Text = Annotated[str, msgspec.Meta(max_length=65536)]
Sentences = Annotated[tuple[Text, ...], msgspec.Meta(max_length=1024)]
FdCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_FDS)]
Shapes = Annotated[tuple[OutputShape, ...], msgspec.Meta(max_length=MAX_OPERANDS)]


class Value(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the structs inside messages."""


class Sandbox(Value, frozen=True, omit_defaults=True):
    """The sandbox of a service process.

    Attributes:
        mode: ``"strict"``, ``"on"`` or ``"off"``.
        landlock: Version of Landlock, which limits files, ports and processes; 0 if Landlock is off.
        seccomp: True if the process is limited to a list of system calls.
        granted: The additional rights that devices have got, one sentence for each device.
        missing: Parts of the sandbox that the kernel or container lacks.

    Example:
        >>> with nnburst.launch(sandbox="off") as service:
        ...     service.sandbox.mode
        'off'
    """

    mode: Name
    landlock: Id = 0
    seccomp: bool = False
    granted: Sentences = ()
    missing: Sentences = ()

    def __str__(self) -> str:
        walls = [f"Landlock {self.landlock}"] * bool(self.landlock) + ["seccomp"] * self.seccomp
        text = f"{self.mode}: {', '.join(walls) or 'no wall'}" if self.mode != "off" else self.mode
        text += f"; without {', '.join(self.missing)}" if self.missing else ""
        return text + "".join(f"; {sentence}" for sentence in self.granted)


class WireMemory(Value, frozen=True, omit_defaults=True):
    """A memory; in a request also a buffer or a `Steps`. The message's next `n_fds` descriptors belong to it.

    `buffer`: 0, or the id of a driver-managed buffer; `steps`: the number of steps of a request. If `buffer` or `steps`
        is set, all other fields are ignored.
    """

    kind: Annotated[str, msgspec.Meta(max_length=64)]
    size: Unsigned64
    prot: Annotated[int, msgspec.Meta(ge=0, le=255)]
    offset: Unsigned64
    n_fds: Annotated[int, msgspec.Meta(ge=0, le=8)] = 1
    direct: bool = False
    image: ImageLayout | None = None
    buffer: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    steps: Steps | None = None


Pools = Annotated[tuple[WireMemory, ...], msgspec.Meta(max_length=MAX_FDS)]


class WireGrantor(Value, frozen=True):
    """One region of a queue, in bytes."""

    flags: Id
    fd_index: Id
    offset: Id
    extent: Unsigned64


class WireQueue(Value, frozen=True):
    """An `MQDescriptor` without its file descriptors."""

    grantors: Annotated[tuple[WireGrantor, ...], msgspec.Meta(max_length=16)]
    quantum: Id
    flags: Id
    n_fds: Annotated[int, msgspec.Meta(ge=1, le=16)]


class WireModel(Value, frozen=True):
    """A `Model` with handles in place of pools.

    `referenced`: the subgraphs of IF and WHILE; `operand_values`: bytes of CONSTANT_COPY operands; `pools`: bytes of
        CONSTANT_REFERENCE operands; `extension_name_to_prefix`: the upper 16 bits of an extension's types and
        operations.
    """

    main: Subgraph
    referenced: Annotated[tuple[msgspec.Raw, ...], msgspec.Meta(max_length=MAX_REFERENCED)]
    operand_values: bytes
    pools: Pools
    relax_computation_float32_to_float16: bool
    extension_name_to_prefix: Annotated[dict[Name, int], msgspec.Meta(max_length=1024)]
    input_names: Annotated[tuple[ArgumentName, ...], msgspec.Meta(max_length=MAX_OPERANDS)]
    output_names: Annotated[tuple[ArgumentName, ...], msgspec.Meta(max_length=MAX_OPERANDS)]


_subgraphs = msgspec.msgpack.Decoder(Subgraph)


def referenced_from_wire(encoded: Sequence[msgspec.Raw]) -> tuple[Subgraph, ...]:
    """Decode the subgraphs that a model refers to.

    Raises:
        InvalidArgument: There are too many operands or operations, or an item is not a subgraph.
    """
    graphs: list[Subgraph] = []
    left = MAX_OPERANDS
    for raw in encoded:
        try:
            graph = _subgraphs.decode(raw)
        except Exception as error:  # the sender's bytes can cause any error
            raise InvalidArgument(f"subgraph {len(graphs)} cannot be read: {error}") from None
        graphs.append(graph)
        left -= max(len(graph.operands), len(graph.operations))
        if left < 0:
            raise InvalidArgument(f"the subgraphs of the model have more than {MAX_OPERANDS} operands or operations")
    return tuple(graphs)


class WireRequest(Value, frozen=True):
    """A `Request` with handles in place of pools."""

    inputs: Annotated[tuple[RequestArgument, ...], msgspec.Meta(max_length=MAX_OPERANDS)]
    outputs: Annotated[tuple[RequestArgument, ...], msgspec.Meta(max_length=MAX_OPERANDS)]
    pools: Pools


class Message(Struct, frozen=True, forbid_unknown_fields=True, tag_field="call"):
    """Base of all messages."""


# -- messages --------------------------------------------------------------------------------------------------------


class Done(Message, tag="done", frozen=True):
    """The reply of a successful call that returns nothing."""


class ErrorReply(Message, tag="error", frozen=True, omit_defaults=True):
    """The reply of a failed call.

    `cache`: the reason for refusing cache files.
    """

    status: Annotated[int, msgspec.Meta(ge=1, le=8)]
    message: Text
    output_shapes: Shapes = ()
    cache: CacheReason | None = None


class Hello(Message, tag="hello", frozen=True, omit_defaults=True):
    """Opens a connection.

    `own`: true for a connection that runs the client's own models.
    """

    version: tuple[Id, Id]
    pid: Id
    own: bool = False


class HelloReply(Message, tag="hello.reply", frozen=True, omit_defaults=True):
    """The reply to `Hello`."""

    version: tuple[Id, Id]
    pid: Id
    sandbox: Sandbox | None = None


class ListDevices(Message, tag="list_devices", frozen=True):
    """Lists the devices of the service."""


class ListDevicesReply(Message, tag="list_devices.reply", frozen=True, omit_defaults=True):
    """The reply to `ListDevices`.

    `apart`: indexes of the devices for which the client must open another connection, with `Hello.own` set.
    """

    devices: Annotated[tuple[DeviceInfo, ...], msgspec.Meta(max_length=256)]
    apart: Annotated[tuple[Id, ...], msgspec.Meta(max_length=256)] = ()


class ListModels(Message, tag="list_models", frozen=True):
    """Lists, for all devices, the models that can be opened by name."""


class ListModelsReply(Message, tag="list_models.reply", frozen=True, omit_defaults=True):
    """The reply to `ListModels`.

    `digests`: SHA-256 of the files of each model; empty for a model without files.
    """

    names: Annotated[tuple[ArgumentName, ...], msgspec.Meta(max_length=65536)]
    digests: Annotated[tuple[ArgumentName, ...], msgspec.Meta(max_length=65536)] = ()


class GetDeviceStatus(Message, tag="get_device_status", frozen=True):
    """Asks for the status of a device."""

    device: Id


class GetDeviceStatusReply(Message, tag="get_device_status.reply", frozen=True):
    status: DeviceStatus


class GetSupportedOperations(Message, tag="get_supported_operations", frozen=True):
    """Asks which operations of a model a device can run. Carries the descriptors of the pools."""

    device: Id
    model: WireModel


class GetSupportedOperationsReply(Message, tag="get_supported_operations.reply", frozen=True):
    supported: Annotated[tuple[bool, ...], msgspec.Meta(max_length=MAX_OPERANDS)]


class ImportModel(Message, tag="import_model", frozen=True):
    """Reads a model from a file, or looks one up by name. Carries the descriptors of the pools."""

    device: Id
    source: ArgumentName
    pools: Pools = ()


class ImportModelReply(Message, tag="import_model.reply", frozen=True):
    """The reply to `ImportModel`.

    `model`: the model without pools; `files`: the name of each pool's file, empty for the imported
    file; `optional_inputs`: the number of inputs with defaults, which come last.
    """

    model: WireModel
    files: Annotated[tuple[ArgumentName, ...], msgspec.Meta(max_length=MAX_FDS)]
    input_shapes: OpenShapes
    output_shapes: OpenShapes
    optional_inputs: Id = 0
    metadata: ModelMetadata | None = None


Bytes32 = Annotated[bytes, msgspec.Meta(max_length=32)]
"""A SHA-256 digest of 32 bytes, or empty."""
Generation = Annotated[bytes, msgspec.Meta(max_length=16)]


class PrepareModel(Message, tag="prepare_model", frozen=True):
    """Compiles a model. Carries the descriptors of pools, model cache files, data cache files and their directory."""

    device: Id
    model: WireModel
    job: CompileJob


class PrepareModelReply(Message, tag="prepare_model.reply", frozen=True, omit_defaults=True):
    """The reply to `PrepareModel`.

    `takes_steps`: true if a burst can use a `Steps`, so that one request runs several steps of the model.
    """

    prepared_model: Id
    cache: SaveResult | None = None
    takes_steps: bool = False


class PrepareModelFromCache(Message, tag="prepare_model_from_cache", frozen=True):
    """Restores a model. Carries the descriptors of model cache files, data cache files and their directory."""

    device: Id
    cache: CacheFiles
    deadline_ns: Unsigned64 = 0


class ConfirmCache(Message, tag="confirm_cache", frozen=True):
    """Reports that a saved cache entry has been published."""

    device: Id
    cache_key: Bytes32
    generation: Generation


class ConfirmCacheReply(Message, tag="confirm_cache.reply", frozen=True):
    known: bool


class Execute(Message, tag="execute", frozen=True):
    """Runs an execution without a burst. Carries the descriptors of the pools."""

    prepared_model: Id
    request: WireRequest
    options: RunOptions


class ExecuteReply(Message, tag="execute.reply", frozen=True):
    status: Annotated[int, msgspec.Meta(ge=0, le=8)]
    output_shapes: Shapes
    timing: Timing
    reason: Text = ""


class ExecuteFenced(Message, tag="execute_fenced", frozen=True):
    """Launches an execution that waits for fences. Carries the descriptors of the pools, then one for each fence."""

    prepared_model: Id
    request: WireRequest
    options: RunOptions
    fences: FdCount = 0
    duration_ns: Unsigned64 = 0


class ExecuteFencedReply(Message, tag="execute_fenced.reply", frozen=True):
    """The reply to `ExecuteFenced`. Carries the descriptor of the fence that the execution will signal."""

    execution: Id


class GetFencedInfo(Message, tag="get_fenced_info", frozen=True):
    """Asks how a fenced execution ended."""

    execution: Id


class GetFencedInfoReply(Message, tag="get_fenced_info.reply", frozen=True):
    status: Annotated[int, msgspec.Meta(ge=0, le=8)]
    launched: Timing
    fenced: Timing
    reason: Text = ""


class CancelFenced(Message, tag="cancel_fenced", frozen=True):
    """Cancels a fenced execution that has not started."""

    execution: Id


Roles = Annotated[tuple[BufferRole, ...], msgspec.Meta(max_length=MAX_OPERANDS)]
Dimensions = Annotated[tuple[Id, ...], msgspec.Meta(max_length=64)]


class Allocate(Message, tag="allocate", frozen=True):
    """Allocates a driver-managed buffer. Each role has an index into `prepared_models`, which lists object numbers."""

    device: Id
    dimensions: Dimensions
    prepared_models: Annotated[tuple[Id, ...], msgspec.Meta(max_length=MAX_OPERANDS)]
    input_roles: Roles
    output_roles: Roles


class AllocateReply(Message, tag="allocate.reply", frozen=True):
    buffer: Id
    id: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class CopyTo(Message, tag="copy_to", frozen=True):
    """Copies a buffer into a memory. Carries the memory's descriptors."""

    buffer: Id
    memory: WireMemory


class CopyToReply(Message, tag="copy_to.reply", frozen=True):
    generation: Unsigned64


class CopyFrom(Message, tag="copy_from", frozen=True):
    """Copies a memory into a buffer. Carries the memory's descriptors."""

    buffer: Id
    memory: WireMemory
    dimensions: Dimensions = ()


class CopyBuffer(Message, tag="copy_buffer", frozen=True):
    """Copies a buffer into another, inside the device."""

    buffer: Id
    source: Id


class ConfigureBurst(Message, tag="configure_execution_burst", frozen=True, omit_defaults=True):
    """Opens a burst. Carries the descriptors of the request channel and the result channel.

    `callback`: the client's number for the burst, not 0; `polling_window`: seconds that the service polls, None for the
    default; `cpus`: processors that the client may run on; `bell`: true if a descriptor of
    the bell's socket follows; `loop_timeout_ns`: limit of each WHILE, 0 for the default.
    """

    prepared_model: Id
    callback: Id
    request_channel: WireQueue
    result_channel: WireQueue
    polling_window: Annotated[float, msgspec.Meta(ge=0, le=60)] | None = None
    cpus: Cpus = ()
    bell: bool = False
    loop_timeout_ns: Unsigned64 = 0


class ConfigureBurstReply(Message, tag="configure_execution_burst.reply", frozen=True, omit_defaults=True):
    """The reply to `ConfigureBurst`.

    `cpus`: CPUs on which the listening thread may run; `pipelined`: true if the client may send a request before
        earlier requests are answered. It is false if `ConfigureBurst.bell` was false.
    """

    burst: Id
    cpus: Cpus = ()
    pipelined: bool = False


class GetMemories(Message, tag="get_memories", frozen=True):
    """Fetches the memories behind slots."""

    callback: Id
    slots: Annotated[tuple[Slot, ...], msgspec.Meta(min_length=1, max_length=MAX_FDS)]


class GetMemoriesReply(Message, tag="get_memories.reply", frozen=True):
    """The memories in the order of the slots; none if `status` is not 0. Carries the memories' descriptors."""

    status: Annotated[int, msgspec.Meta(ge=0, le=8)]
    memories: Pools = ()


class FailureReason(Message, tag="failure_reason", frozen=True):
    """Fetches the message of a burst's last failure."""

    burst: Id


class FailureReasonReply(Message, tag="failure_reason.reply", frozen=True):
    reason: Text


class EndNotice(Message, tag="ending", frozen=True, omit_defaults=True):
    """Reports why the service ends or, if `callback` is not 0, why the burst that was opened with this number ends."""

    reason: Text
    callback: Id = 0


class FreeMemory(Message, tag="free_memory", frozen=True):
    """Releases the memory behind a slot."""

    burst: Id
    slot: Slot


class Release(Message, tag="release", frozen=True):
    """Releases a prepared model, a burst or a buffer. No error if it does not exist."""

    object: Id


class EndClients(Message, tag="end_clients", frozen=True, omit_defaults=True):
    """Ends all connections of a process, and their runs. Only for the user who runs the service and for root.

    `uid`: if set, all connections of this user end instead, except those of the asking process. The process that runs
        this user's own models ends, too.
    """

    pid: Id = 0
    uid: Id | None = None


class EndClientsReply(Message, tag="end_clients.reply", frozen=True):
    """The number of connections that were ended."""

    connections: Id


class TakeClient(Message, tag="take_client", frozen=True):
    """Hands a client over to a worker. Carries the descriptors of the client's socket and its pidfd (if any)."""

    number: Id
    has_pidfd: bool


class ClientGone(Message, tag="client_gone", frozen=True, omit_defaults=True):
    """Reports that a client that was handed over has disconnected, or why it is not served."""

    number: Id
    reason: Text = ""


class LoadModel(Message, tag="load_model", frozen=True):
    """Reloads or unloads all versions of a named model. Only for the user who runs the service and for root."""

    name: ArgumentName
    unload: bool


class WithdrawModel(Message, tag="withdraw_model", frozen=True):
    """Stops serving a model under its name. Only for the broker."""

    name: ArgumentName


class PublishModel(Message, tag="publish_model", frozen=True, omit_defaults=True):
    """Compiles an imported model and serves it under a name. Only the broker sends it, with the pools' descriptors.

    `batch`: maximum number of rows in one run; `batch_wait`: seconds that a request waits for others.
    """

    name: ArgumentName
    device: Id
    model: WireModel
    input_shapes: OpenShapes
    output_shapes: OpenShapes
    optional_inputs: Id = 0
    digest: ArgumentName = ""
    batch: Annotated[int, msgspec.Meta(ge=1, le=lib.NNB_MOST_BATCHED)] = 1
    batch_wait: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0


class Goodbye(Message, tag="goodbye", frozen=True):
    """Releases everything that the connection owns, then answers. The last call."""


# -- the table ---------------------------------------------------------------------------------------------------------


def dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _none(message: Any) -> int:
    return 0


def _of_pools(pools: tuple[WireMemory, ...]) -> int:
    return sum(pool.n_fds for pool in pools)


def _of_cache(files: CacheFiles | None) -> int:
    return 0 if files is None else len(files.fds)


class Call(Struct, frozen=True):
    """A row of `CALLS`.

    Attributes:
        computes: True if a device computes during the call. Other calls never wait for computing calls.
    """

    request: type[Message]
    reply: type[Message]
    side: Side = Side.SERVICE
    computes: bool = False
    request_fds: Callable[[Any], int] = _none
    reply_fds: Callable[[Any], int] = _none

    @property
    def name(self) -> str:
        return str(self.request.__struct_config__.tag)

    @property
    def handler(self) -> str:
        """The name of the serving method, which takes (request, fds) and returns the reply or (reply, fds)."""
        return f"on_{self.name}"


CALLS: tuple[Call, ...] = (
    Call(Hello, HelloReply),
    Call(ListDevices, ListDevicesReply),
    Call(ListModels, ListModelsReply),
    Call(GetDeviceStatus, GetDeviceStatusReply),
    Call(
        GetSupportedOperations,
        GetSupportedOperationsReply,
        computes=True,
        request_fds=lambda m: _of_pools(m.model.pools),
    ),
    Call(ImportModel, ImportModelReply, computes=True, request_fds=lambda m: _of_pools(m.pools)),
    Call(
        PrepareModel,
        PrepareModelReply,
        computes=True,
        request_fds=lambda m: _of_pools(m.model.pools) + _of_cache(m.job.cache),
    ),
    Call(PrepareModelFromCache, PrepareModelReply, computes=True, request_fds=lambda m: _of_cache(m.cache)),
    Call(ConfirmCache, ConfirmCacheReply),
    Call(Execute, ExecuteReply, computes=True, request_fds=lambda m: _of_pools(m.request.pools)),
    Call(
        ExecuteFenced,
        ExecuteFencedReply,
        request_fds=lambda m: _of_pools(m.request.pools) + m.fences,
        reply_fds=lambda m: 1,
    ),
    Call(GetFencedInfo, GetFencedInfoReply),
    Call(CancelFenced, Done),
    Call(
        ConfigureBurst,
        ConfigureBurstReply,
        request_fds=lambda m: m.request_channel.n_fds + m.result_channel.n_fds + m.bell,
    ),
    Call(GetMemories, GetMemoriesReply, side=Side.CLIENT, reply_fds=lambda m: _of_pools(m.memories)),
    Call(FailureReason, FailureReasonReply),
    Call(EndNotice, Done, side=Side.CLIENT),
    Call(FreeMemory, Done),
    Call(Allocate, AllocateReply),
    Call(CopyTo, CopyToReply, request_fds=lambda m: m.memory.n_fds),
    Call(CopyFrom, Done, request_fds=lambda m: m.memory.n_fds),
    Call(CopyBuffer, Done),
    Call(EndClients, EndClientsReply, side=Side.BROKER),
    Call(TakeClient, Done, request_fds=lambda m: 1 + m.has_pidfd),
    Call(PublishModel, Done, computes=True, request_fds=lambda m: _of_pools(m.model.pools)),
    Call(WithdrawModel, Done),
    Call(LoadModel, Done, side=Side.BROKER),
    Call(ClientGone, Done, side=Side.CLIENT),
    Call(Release, Done),
    Call(Goodbye, Done),
)

CALL_BY_REQUEST: Mapping[type[Message], Call] = {call.request: call for call in CALLS}


def _encodable(value: Any) -> Any:
    """Convert a NumPy scalar or a mapping in a model to a plain value."""
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, np.floating):
        return float(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} cannot be sent")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encodable)
_request_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Union[tuple(CALL_BY_REQUEST)])  # noqa: UP007
_first_decoder: msgspec.msgpack.Decoder[Hello | EndClients | LoadModel] = msgspec.msgpack.Decoder(
    Hello | EndClients | LoadModel
)
_error_decoder = msgspec.msgpack.Decoder(ErrorReply)
_reply_decoders = {call.request: msgspec.msgpack.Decoder(call.reply) for call in CALLS}


def encode(message: Message) -> bytes:
    """Return the body of a message. Raises `TypeError`, `ValueError` or `OverflowError` for wrong fields."""
    return _encoder.encode(message)


def encode_request(message: Message) -> bytes:
    """Encode a request. Raises `InvalidArgument`, which names the field, if the other side could not read it."""
    name = CALL_BY_REQUEST[type(message)].name
    try:
        body = encode(message)
        _request_decoder.decode(body)
    except Exception as error:
        raise InvalidArgument(f"{name} cannot be sent: {error}") from error
    return body


def encode_reply(call: Call, message: Message) -> bytes:
    """Encode a reply. Raises `GeneralFailure`, which names the field, if the other side could not read it."""
    try:
        body = encode(message)
        _reply_decoders[call.request].decode(body)
    except Exception as error:
        raise GeneralFailure(f"the answer to {call.name} cannot be sent: {error}") from error
    return body


def _decode(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except Exception as error:  # the sender is at fault, whatever the error
        raise Malformed(f"undecodable message: {type(error).__name__}: {error}") from None


def decode_request(body: bytes, side: Side) -> tuple[Call, Message]:
    """Decode a request that `side` serves. Raises `Malformed` for any other body."""
    message: Message = _decode(_request_decoder, body)
    call = CALL_BY_REQUEST[type(message)]
    if call.side is not side:
        raise Malformed(f"{call.name} is not a call to the {side.value}")
    return call, message


def decode_first(body: bytes) -> Hello | EndClients | LoadModel:
    """Decode the first request of a connection to a shared service. Raises `Malformed` for any other body."""
    return _decode(_first_decoder, body)


def decode_reply(call: Call, body: bytes) -> Message:
    """Decode the reply to `call`. Raises `Malformed` for any other body."""
    return _decode(_reply_decoders[call.request], body)


def decode_error(body: bytes) -> ErrorReply:
    """Decode an error reply. Raises `Malformed` for any other body."""
    return _decode(_error_decoder, body)


def error_reply(error: NNBurstError) -> ErrorReply:
    """Return the reply for an exception. A status that the protocol lacks becomes GENERAL_FAILURE."""
    failure = failure_of(error)
    reason = error.reason if isinstance(error, CacheRejected) else None
    return ErrorReply(int(failure[0]), sendable(failure.reason), failure[1], reason)


def error_of(reply: ErrorReply) -> NNBurstError:
    """Return the exception that an error reply describes."""
    status = ErrorStatus(reply.status)
    if reply.cache is not None:
        message = reply.message.rsplit(" [", 1)[0]  # the exception adds the ending again
        return CacheRejected(reply.cache, message, status=status)
    return error_for(status, reply.message, reply.output_shapes)


def sendable(text: str) -> str:
    """Return a text as valid UTF-8, cut to the maximum length in a message."""
    text = text.encode(errors="backslashreplace").decode()  # a file name may contain invalid UTF-8
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"
