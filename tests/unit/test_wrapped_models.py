"""Models that stand for others: a published one is what was compiled, whatever way it is used."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from nnburst import Memory, ModelBuilder, OperandType
from nnburst.devices import PreparedModel
from nnburst.devices.described import DeviceInfo
from nnburst.devices.fence import FenceSignal
from nnburst.devices.named import NamedDevice
from nnburst.devices.reference.device import ReferenceDevice
from nnburst.errors import ErrorStatus, InvalidArgument
from nnburst.model import Request
from nnburst.model.extensions import ImportedModel
from nnburst.model.types import DataLocation, RequestArgument
from nnburst.service.client.proxies import RemoteDevice


@pytest.fixture
def published() -> Iterator[PreparedModel]:
    """y = x + 1 of four numbers, opened by name."""
    b = ModelBuilder()
    b.output("y", b.add(b.input("x", OperandType.TENSOR_FLOAT32, (4,)), np.ones(4, np.float32)))
    device = ReferenceDevice()
    named = NamedDevice([device])
    named.publish("plus", device, ImportedModel(b.build(), (), ((4,),), ((4,),)))
    prepared = named.prepare_model(named.import_model("name:plus").model)
    yield prepared
    prepared.close()
    named.close()


def request_on(memory: Memory, nbytes: int = 16) -> Request:
    x, y = (RequestArgument(location=DataLocation(0, at, nbytes)) for at in (0, 64))
    return Request((x,), (y,), (memory,))


def test_published_model_checks_a_fenced_request_before_it_waits(published: PreparedModel) -> None:
    with Memory.ashmem(128) as memory, FenceSignal() as never, never.fence:
        with pytest.raises(InvalidArgument):
            published.execute_fenced(request_on(memory, 12), [never.fence])
        run = published.execute_fenced(request_on(memory))
        with run.fence as fence:
            fence.wait(30)
        assert run.info().status is ErrorStatus.NONE
        assert memory.array(np.float32, (4,), 64).tolist() == [1] * 4


def test_proxy_says_of_itself_what_the_device_says() -> None:
    info = DeviceInfo.of(ReferenceDevice())
    proxy = RemoteDevice(info, None)  # type: ignore[arg-type]
    assert DeviceInfo.of(proxy) == info
