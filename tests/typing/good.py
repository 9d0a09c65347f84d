"""What users write: mypy --strict and pyright accept it all, and know what comes back. Never run; `make lint`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, assert_type

import numpy as np
import numpy.typing as npt

import nnburst
from nnburst import Needs, Tensor, declare
from nnburst.fmq import MessageQueue
from nnburst.model import ExecutionPreference, Priority
from nnburst.testing import inject

Array = np.ndarray[Any, np.dtype[Any]]
image: npt.NDArray[np.float32] = np.zeros((1, 8), np.float32)


def built() -> nnburst.Model:
    builder = nnburst.ModelBuilder()
    x = builder.input("x", nnburst.OperandType.TENSOR_FLOAT32, (1, 8, 8, 1))
    filters = np.ones((4, 3, 3, 1), np.float32)
    y = builder.conv_2d(x, filters, None, padding="same", stride=(1, 1), activation="relu", layout="NHWC")
    y = builder.max_pool_2d(y, 2, stride=2, padding="valid", activation=None)
    y = builder.add(y, 1.0, activation="relu6")
    builder.output("y", assert_type(builder.softmax(y * 2 + image), nnburst.Operand))
    return builder.build()


def own(path: str, on_death: Literal["raise", "restart"] = "raise") -> Array:
    with nnburst.Session(
        path, on_death=on_death, sandbox="strict", preference="low_power", priority="high", timeout=0.5
    ) as session:
        (scores,) = session.run(None, {"image": image}, timeout=None)
        with session.bind(shapes={"n": 1}) as execution:
            execution.inputs["image"][:] = image
            execution.run()
            assert_type(execution, nnburst.Execution)
        for outputs in session.run_many([{"image": image}], batch=2):
            assert_type(outputs[0], Array)
        for outcome in session.run_many([{"image": image}], on_error="return"):
            if not isinstance(outcome, nnburst.NNBurstError):
                assert_type(outcome, list[Array])
        return assert_type(scores, Array)


async def awaited(session: nnburst.Session, inputs: Mapping[str, list[float]]) -> list[Array]:
    return await session.arun(["y"], inputs)


def shared(priority: Literal["low", "medium", "high"] | Priority = "medium") -> None:
    with nnburst.connect("vision", trust_uid={1000}) as service:
        assert_type(service, nnburst.Service)
        with service.session("detector", priority=priority, on_death="restart", retry=1) as session:
            session.run(None, {"image": image})


def launched(model: nnburst.Model) -> None:
    with nnburst.launch(
        devices=["nnburst-reference"], sandbox="off", log_level="info", scheduler=("fifo", 20), affinity={1}
    ) as service:
        with nnburst.nnapi.Compilation(model, service) as compilation:
            compilation.set_preference(ExecutionPreference.SUSTAINED_SPEED)
            compilation.set_priority("low")
            compilation.set_caching("cache", bytes(32))
            compilation.finish()
            with nnburst.nnapi.Execution(compilation) as execution:
                execution.compute()


def memory() -> None:
    with nnburst.Memory.ashmem(4096) as pool, nnburst.Memory.hardware_buffer(4, 4, "NV12"):
        assert_type(pool.array(np.float32, (4,)), Array)
    nnburst.Memory.hardware_buffer_blob(4096).close()


def queues() -> None:
    with MessageQueue(np.int32, 8, flavour="unsynchronized", layout="lines") as queue:
        queue.write(np.array([1], np.int32))


@declare(inputs=[Tensor("x", "float32", (None, 8))], outputs=[Tensor("y", "float32", (None, 8))], needs=Needs())
def doubled(x: Array) -> Array:
    return x * 2


def sent() -> None:
    with nnburst.Session(doubled), nnburst.launch(functions=[doubled]) as service:
        assert_type(service.session("doubled"), nnburst.Session)


def broken(service: nnburst.Service) -> str:
    try:
        with inject(service, at="run", crash_on=2), service.session(built()) as session:
            session.run(None, {"image": image})
    except (nnburst.DeadObject, nnburst.MissedDeadline) as error:
        return f"{error.status.name}: {error}"
    return ""
