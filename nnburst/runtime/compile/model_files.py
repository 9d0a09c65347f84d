"""Models given by file or by name, and the devices that read model files."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeGuard

from msgspec.structs import replace

from ...errors import DeviceUnavailable, GeneralFailure, InvalidArgument, NoSuchFile, error_for
from ...model.extensions import ImportedModel
from ...model.types import DataLocation, Lifetime, Model
from ..service import DEFAULT_DEVICES

if TYPE_CHECKING:
    from ...devices.interfaces import Device
    from ...memory.memory import Memory
    from ...service.client.connection import ServiceConnection
    from ..service import Service

ModelSource = Model | str | os.PathLike[str] | bytes | Callable[..., Any]
"""A model as `nnburst.Session` accepts it."""
FUNCTIONS = "nnburst-function"
_ONNX, _TFLITE = ".onnx", ".tflite"
SUFFIXES = {_ONNX: "nnburst-onnxruntime", _TFLITE: "nnburst-litert"}
"""The devices that read model files, by suffix."""
_EXTRAS = {"nnburst-onnxruntime": ("onnxruntime", "onnx"), "nnburst-litert": ("ai_edge_litert", "litert")}
"""The module that each device needs, and the extra that installs the module."""
_ANY = " or ".join(SUFFIXES)
_WAYS_OUT = "torch.onnx.export() writes such files, tf2onnx and others convert to them"


def devices_for(model: Model | str | bytes, device: str | None) -> Sequence[str]:
    """Return the devices of a service for one model.

    Args:
        model: A model, the path of a file, or its bytes.
        device: Name of the device that must run the model; None for any.

    Raises:
        InvalidArgument: No device can read the file.
    """
    if device is not None and device not in DEFAULT_DEVICES:
        return (device,)
    if isinstance(model, Model):
        return DEFAULT_DEVICES
    if is_name(model):
        raise _no_reader(model) or NoSuchFile(
            f"there is no file {model!r}, and devices read files whose names end with {_ANY}; a model by its name "
            "needs service=, such as nnburst.connect(…)"
        )
    return (device or reader_of(model),)


def reader_of(source: str | bytes) -> str:
    """Return the device that reads a file, found by the suffix of the path, or by the first bytes of the contents."""
    return SUFFIXES[_suffix(source)]


def _suffix(source: str | bytes) -> str:
    is_tflite = source[4:8] == b"TFL3" if isinstance(source, bytes) else source.lower().endswith(_TFLITE)
    return _TFLITE if is_tflite else _ONNX


def is_name(source: str | bytes) -> TypeGuard[str]:
    """Return True if a source is the name of a service's model, not a file."""
    return isinstance(source, str) and not source.lower().endswith(tuple(SUFFIXES))


def _no_reader(path: str) -> InvalidArgument | None:
    """Return the error for a path that no device accepts. Return None if `path` may be a model's name instead."""
    if os.path.exists(path):
        path = f"the directory {path!r}" if os.path.isdir(path) else repr(path)
        return InvalidArgument(f"no device reads {path}; give a file whose name ends with {_ANY}: {_WAYS_OUT}")
    if os.sep in path:
        return NoSuchFile(f"there is no file {path!r}; devices read files whose names end with {_ANY}")
    return None


@contextlib.contextmanager
def find_model(
    service: Service, device: str | None, model: Model | str | bytes
) -> Iterator[tuple[Model | ImportedModel, Service | Sequence[Device]]]:
    """Find a model and its devices. Raises the same errors as `import_model`."""
    if isinstance(model, Model):
        yield model, service if device is None else (service.device(device),)
    else:
        with import_model(service, device, model) as (reader, read):
            yield read, (reader,)


@contextlib.contextmanager
def import_model(
    service: Service | ServiceConnection, name: str | None, source: str | bytes
) -> Iterator[tuple[Device, ImportedModel]]:
    """Let a device of a service read a model. The model's files stay open during the ``with`` block.

    Args:
        name: Name of the device; None for the device that reads the file or has the named model.
        source: Path of a file with a known suffix, the file's bytes, or a model's name.

    Raises:
        InvalidArgument: A file is missing, not a regular file, or outside the model's directory; the suffix is unknown;
            or no device has the named model.
        DeviceUnavailable: The service does not have the device.
        GeneralFailure: The device cannot read the file.
    """
    if is_name(source):
        yield _by_name(service, name, source)
        return
    device = _reader(service, name or reader_of(source), "the model" if isinstance(source, bytes) else source)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(copy_to_memory(source) if isinstance(source, bytes) else _open(source, None))
        try:
            found = device.import_model(_suffix(source)[1:], [file])
        except (InvalidArgument, GeneralFailure) as error:
            what = "the bytes of the model" if isinstance(source, bytes) else f"model file {source!r}"
            raise error_for(error.status, f"{what}: {error}") from None
        if isinstance(source, bytes):
            if found.files[1:]:
                raise InvalidArgument(
                    f"the model has external files {list(found.files[1:])}; give its path (…{_ONNX}), not its bytes"
                )
            directory = ""
        else:
            directory = os.path.dirname(os.path.abspath(source))
        others = [stack.enter_context(_open(other, directory)) for other in found.files[1:]]
        yield device, replace(found, model=_with_pools(found.model, (file, *others)))


def checked_source(
    model: object, examples: object, device: str | None, *, has_service: bool
) -> tuple[Model | str | bytes, bytes]:
    """Return the model to open, and pickled Python functions to send to the service (empty if it is no function).

    Args:
        examples: Example inputs of a torch module.
        device: Name of the device that must run the model; None for any.
        has_service: True if the session uses an existing service, which accepts no functions.

    Raises:
        InvalidArgument: `model` is not a model, or does not suit the other arguments.
    """
    if not isinstance(model, Model | str | os.PathLike | bytes) and callable(model):
        from .own_code import from_torch, is_torch_module

        if is_torch_module(model):
            model, examples = from_torch(model, examples, device), None
    if examples is not None:
        raise InvalidArgument("example_inputs are for torch modules: other models say what they take")
    if isinstance(model, Model | str | bytes | os.PathLike):
        return model if isinstance(model, Model) else os.fspath(model), b""
    if not callable(model):
        raise InvalidArgument(
            f"model is a {type(model).__name__}; give a path, the bytes of a file (SerializeToString() of onnx), what "
            "ModelBuilder.build() returns, a torch module, or a function with @nnburst.declare above it; of other "
            f"libraries, a file: {_WAYS_OUT}"
        )
    from ...devices.function import declaration_of, encode_functions

    sent = encode_functions(model)
    name = declaration_of(model).name
    if has_service:
        raise InvalidArgument(
            f"{name!r} is code, which goes only to a service that starts with it: leave out service=, "
            "or give its name at a service that has it, by launch(functions=[…]) or `nnburst serve FILE.py:FUNCTION`"
        )
    return name, sent


def copy_to_memory(data: bytes) -> Memory:
    """Return new shared memory with the given bytes."""
    if not data:
        raise InvalidArgument("the bytes of the model are empty")
    from ...memory.memory import Memory

    memory = Memory.ashmem(len(data), "nnburst-model")
    memory.buffer[:] = data
    return memory


def _reader(service: Service | ServiceConnection, name: str, source: str) -> Device:
    try:
        return service.device(name)
    except DeviceUnavailable as error:
        module, extra = _EXTRAS.get(name, ("", ""))
        missing = module and find_spec(module) is None
        hint = f"pip install 'nnburst[{extra}]'" if missing else f"launch(devices=[{name!r}])"
        raise DeviceUnavailable(f"{source!r} needs the device {name}: {hint} ({error})") from None


def _by_name(service: Service | ServiceConnection, device: str | None, name: str) -> tuple[Device, ImportedModel]:
    candidates = service.devices if device is None else (service.device(device),)
    known = []
    for candidate in candidates:
        try:
            return candidate, candidate.import_model(f"name:{name}")
        except InvalidArgument as error:
            known.append(str(error))
        except GeneralFailure:
            pass  # the device has no named models
    if (not known or os.sep in name) and (refusal := _no_reader(name)):
        raise refusal
    where = "this service" if device is None else device
    raise InvalidArgument(f"no model {name!r}: {'; '.join(known) or f'{where} has no models by name'}")


def _open(path: str, directory: str | None) -> Memory:
    """Open a file for reading only.

    Args:
        path: Path of a model file. With a `directory`, path of a file with external data, relative to the directory.
        directory: Directory that must contain the file; None for a model file. The file can be a symbolic link to any
            place, as in the caches of model hubs.

    Raises:
        InvalidArgument: The file does not exist, or its path leaves the directory.
    """
    full = path if directory is None else os.path.join(directory, path)
    what = f"model file {path!r}" if directory is None else f"external file {path!r} of the model in {directory!r}"
    try:
        fd = os.open(full, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error  # str(error) would repeat the path
        kind = NoSuchFile if isinstance(error, FileNotFoundError) else InvalidArgument
        raise kind(f"{what} cannot be opened: {why}") from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or not status.st_size:
            raise InvalidArgument(f"{what} is empty or no regular file")
        if directory is not None:
            place, root = os.path.realpath(os.path.dirname(full)), os.path.realpath(directory)
            if os.path.commonpath([place, root]) != root:
                raise InvalidArgument(f"{what} lies in {place!r}, which is outside of that directory; copy it there")
        from ...memory.kinds import PROT_READ
        from ...memory.memory import Memory

        return Memory.mmap_fd(fd, status.st_size, prot=PROT_READ)
    finally:
        os.close(fd)


def _with_pools(model: Model, pools: Sequence[Memory]) -> Model:
    """Attach mapped files to a model. The value of a constant that lies in a file becomes all bytes of that file."""
    operands = tuple(
        replace(operand, location=DataLocation(index, 0, pools[index].size))
        if operand.lifetime == Lifetime.CONSTANT_REFERENCE and (index := operand.location.pool_index) < len(pools)
        else operand
        for operand in model.main.operands
    )
    return replace(model, main=replace(model.main, operands=operands), pools=tuple(pools))
