"""Named models, which a service compiles once and clients open by name."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from ..burst.server.group import Batcher
from ..errors import GeneralFailure, InvalidArgument
from ..memory.memory import Memory
from ..model.extensions import Extension, ImportedModel, extension_prefix
from ..model.types import BufferDesc, BufferRole, ExecutionPreference, Model
from ..model.validate import validate_model
from .common import (
    all_extensions,
    build_version,
    call_by_name,
    capabilities_of,
    check_preparation,
    extension_of_names,
    find_named,
)
from .interfaces import Buffer, CompileJob, Device, PreparedModel
from .wrapped import WrappedModel

EXTENSION_NAME = "org.nnburst.named"
_EXTENSION = extension_of_names(EXTENSION_NAME)


@dataclass(eq=False)
class _Published:
    """A published model. The prepared model is closed when this object is freed."""

    imported: ImportedModel
    device: Device
    prepared: PreparedModel
    name: str
    digest: str
    batcher: Batcher | None

    def __post_init__(self) -> None:
        weakref.finalize(self, self.prepared.close).atexit = False


class NamedDevice(Device):
    """A device that opens, by name, models that other devices of this process compiled. Clients share the weights.

    `import_model` returns a placeholder: a model of one operation, whose first input is the name. `prepare_model` of
    the placeholder opens the published model.
    ``NAME:2`` is version 2 of a model, and ``NAME`` alone is the model's newest version.

    Args:
        devices: Devices that compile and run published models. The caller closes the devices.
    """

    name = "nnburst-named"
    version_string = build_version()
    capabilities = capabilities_of()

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = tuple(devices)
        self._models: dict[str, _Published] = {}

    def publish(
        self,
        name: str,
        device: Device,
        imported: ImportedModel,
        digest: str = "",
        batch: int = 1,
        batch_wait: float = 0.0,
    ) -> None:
        """Compile a model and serve it under a name. Open sessions keep the earlier model of that name.

        Args:
            name: Name of the model, not empty.
            imported: The model. The caller may close its pools afterwards.
            batch: Largest number of rows in a batch.
            batch_wait: Seconds that a request waits for other requests, to form a batch with them. A session that
                prefers FAST_SINGLE_ANSWER does not wait.

        Raises:
            InvalidArgument: The model cannot run batches.
            NNBurstError: See `Device.prepare_model`. After any error, an earlier model keeps the name.
        """
        prepared = device.prepare_model(imported.model)
        if batch > 1:
            try:
                prepared.run_together(batch)
            except BaseException:
                prepared.close()
                raise
        batcher = Batcher.make(batch, batch_wait) if batch > 1 else None
        handle = structs.replace(imported, model=_handle(name, imported.model), files=())
        self._models[name] = _Published(handle, device, prepared, name, digest, batcher)

    def withdraw(self, name: str) -> None:
        """Stop serving a model. Open sessions keep it; an unknown name is ignored."""
        self._models.pop(name, None)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._models)

    @property
    def digests(self) -> dict[str, str]:
        """The digest of each published model's file, keyed by the model's name."""
        return {name: published.digest for name, published in self._models.copy().items()}

    def get_supported_extensions(self) -> tuple[Extension, ...]:
        """Return the extension that calls a model by name, and the extensions of the devices that run the models."""
        return _EXTENSION, *all_extensions(self._devices)

    def get_supported_operations(self, model: Model) -> tuple[bool, ...]:
        validate_model(model)
        return tuple(self._find(model) is not None for _ in model.main.operations)

    def import_model(self, source: str, pools: Sequence[Memory] = ()) -> ImportedModel:
        models, name = self._models.copy(), source.removeprefix("name:")
        versions = [each for each in models if (parts := each.rpartition(":"))[0] == name and parts[2].isdecimal()]
        if versions:
            models.setdefault(name, models[max(versions, key=lambda each: int(each.rpartition(":")[2]))])
        return find_named(models, source, self.name, "models").imported

    def prepare_model(self, model: Model, job: CompileJob = CompileJob()) -> SharedModel:
        validate_model(model)
        check_preparation(job)
        published = self._find(model)
        if published is None:
            raise GeneralFailure(
                f"{self.name} opens {sorted(self._models)}, as imported; the service may have new ones"
            )
        return SharedModel(published, job.preference)

    def allocate(
        self,
        desc: BufferDesc,
        prepared_models: Sequence[PreparedModel],
        input_roles: Sequence[BufferRole],
        output_roles: Sequence[BufferRole],
    ) -> Buffer:
        named = {role.model_index for role in (*input_roles, *output_roles)}
        used = [prepared_models[index] for index in named if index < len(prepared_models)]
        homes = {id(model.device): model.device for model in used if isinstance(model, SharedModel)}
        if len(homes) != 1 or not all(isinstance(model, SharedModel) for model in used):
            raise InvalidArgument("a buffer is for models of one device; give roles of models that run on the same one")
        inner = [model.inner if isinstance(model, SharedModel) else model for model in prepared_models]
        return next(iter(homes.values())).allocate(desc, inner, input_roles, output_roles)

    def _find(self, model: Model) -> _Published | None:
        """Return the published model for a model from `import_model`; None for any other model."""
        if not extension_prefix(model, EXTENSION_NAME):
            return None
        published = self._models.get(model.operand_values.decode(errors="replace"))
        return published if published is not None and published.imported.model.main == model.main else None

    def close(self) -> None:
        """Close unused models now, and others after their last client releases them. Idempotent."""
        self._models = {}


class SharedModel(WrappedModel):
    """One client's handle to a published model.

    Attributes:
        device: The device that runs the model.
    """

    def __init__(self, published: _Published, preference: ExecutionPreference) -> None:
        super().__init__(published.prepared)
        self._published: _Published | None = published
        self.label, self.device, self.batcher = published.name, published.device, published.batcher
        if self.batcher is not None and preference is ExecutionPreference.FAST_SINGLE_ANSWER:
            self.batcher = replace(self.batcher, wait_ns=0)

    def close(self) -> None:
        self._published = None


def _handle(name: str, model: Model) -> Model:
    """Return a model with the inputs and outputs of `model`. Its only operation calls a model by its `name`."""
    main, prefix = model.main, max(model.extension_name_to_prefix.values(), default=0) + 1
    return call_by_name(
        name,
        prefix,
        [main.operands[i] for i in main.input_indexes],
        [main.operands[i] for i in main.output_indexes],
        extension_name_to_prefix={**model.extension_name_to_prefix, EXTENSION_NAME: prefix},
        input_names=model.input_names,
        output_names=model.output_names,
    )
