"""The quota `working_bytes`: what bound requests and their runs keep in memory, on every device; what gives it back."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_control_flow import B8, ONE, TRUTH

from nnburst import Memory, Model, ModelBuilder, Operand, OperandType
from nnburst.burst import BurstExecutorWithCache, ExecutionBurstController
from nnburst.burst.cancellation import WorkingMemory
from nnburst.burst.kernel import Kernel
from nnburst.burst.server.server import MAX_PLANS
from nnburst.devices import Device, PreparedModel
from nnburst.devices.function import Tensor, declare
from nnburst.devices.noop import NoopDevice
from nnburst.devices.reference.device import ReferenceDevice
from nnburst.devices.registry import create_device
from nnburst.devices.wrapped import WrappedModel
from nnburst.errors import ErrorStatus, GeneralFailure, ResourceExhausted, error_for
from nnburst.model import Request, RunOptions
from nnburst.model.running import ExecutionResult, reason_of
from nnburst.model.types import DataLocation, OperandDesc, RequestArgument, Steps
from nnburst.service.host.host import ServiceHost
from nnburst.service.host.quotas import PER_USER, Quotas
from support.models import built, relu
from support.services import in_process
from support.waiting import PATIENCE, until, without_collector

F32 = OperandType.TENSOR_FLOAT32
MIB = 1 << 20
KNOB = r"working_bytes.*--quota working_bytes=N, launch\(quotas=\{'working_bytes': N\}\)"


def large(nbytes: int) -> Model:
    """y = max of x, repeated so often that it takes so many bytes."""
    return built([OperandDesc(F32, (4,))], lambda b, x: narrowed(b, b.tile(x, [nbytes // 16])))


def late(nbytes: int) -> Model:
    """The same inside an IF: bound in each run."""
    branch = built([ONE], lambda b, x: narrowed(b, widened(b, x, nbytes)))
    return built([TRUTH, ONE], lambda b, c, x: b.branch(c, branch, branch, [x]))


def at(pool: Memory, number: int, model: Model) -> Request:
    """A request whose arguments lie behind those of the requests with smaller numbers."""
    places, offset = [], 64 * number
    for index in (*model.main.input_indexes, *model.main.output_indexes):
        operand = model.main.operands[index]
        nbytes = int(np.prod(operand.dimensions)) * (1 if operand.type == B8 else 4)
        places.append(RequestArgument(False, DataLocation(0, offset, nbytes)))
        offset += 16
    n = len(model.main.input_indexes)
    return Request(tuple(places[:n]), tuple(places[n:]), (pool,))


class Account:
    """What the only connection of a host has in use."""

    def __init__(self, host: ServiceHost) -> None:
        (self._hosted,) = host.connections

    @property
    def used(self) -> int:
        return self._hosted.ledger.used["working_bytes"]

    def returns_to(self, nbytes: int) -> None:
        until(lambda: self.used == nbytes)


@contextmanager
def served(
    model: Model, quota: int = 1 << 30, device: Device | None = None
) -> Iterator[tuple[PreparedModel, Account, Memory]]:
    quotas = Quotas(working_bytes=quota)
    with in_process([device or ReferenceDevice()], quotas=quotas) as (client, host), Memory.ashmem(1 << 16) as pool:
        yield client.devices[0].prepare_model(model), Account(host), pool


def run_in_burst(burst: ExecutionBurstController, request: Request) -> None:
    burst.bind(request).run()


# ---- what counts -----------------------------------------------------------------------------------------------------


def test_bound_requests_count_and_repeated_runs_count_nothing_more() -> None:
    with served(large(MIB)) as (model, account, pool), ExecutionBurstController.create(model) as burst:
        assert account.used == 0
        bound = [burst.bind(at(pool, n, large(MIB))) for n in range(3)]
        for n, each in enumerate(bound):
            each.run()
            assert MIB * (n + 1) <= account.used < MIB * (n + 2)
        used = account.used
        for _ in range(10):
            for each in bound:
                each.run()
        assert account.used == used


def run_burst(model: PreparedModel, request: Request) -> None:
    with ExecutionBurstController.create(model) as burst:
        run_in_burst(burst, request)


def run_alone(model: PreparedModel, request: Request) -> None:
    result = model.execute_synchronously(request)
    if result[0] is not ErrorStatus.NONE:
        raise error_for(result[0], reason_of(result))


def run_fenced(model: PreparedModel, request: Request) -> None:
    run = model.execute_fenced(request)
    with run.fence, suppress(GeneralFailure):
        run.fence.wait(PATIENCE)
    info = run.info()
    if info.status is not ErrorStatus.NONE:
        raise error_for(info.status, info.reason)


WAYS = [run_burst, run_alone, run_fenced]


@pytest.mark.parametrize("make", [large, late])
@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_needs_more_than_the_quota_is_refused_and_says_which(
    way: Callable[[PreparedModel, Request], None], make: Callable[[int], Model]
) -> None:
    with served(make(2 * MIB), MIB) as (model, account, pool):
        with pytest.raises(ResourceExhausted, match=rf"this connection may have {MIB} {KNOB}"):
            way(model, at(pool, 0, make(2 * MIB)))
        account.returns_to(0)


def test_quota_of_a_user_counts_all_of_its_connections() -> None:
    quotas = PER_USER.replace({"working_bytes": MIB}, of_user=True)
    with in_process([ReferenceDevice()], user_quotas=quotas) as (client, _), Memory.ashmem(4096) as pool:
        model = client.devices[0].prepare_model(large(2 * MIB))
        with pytest.raises(
            ResourceExhausted, match=r"user \d+ may have .* working_bytes.*--quota user.working_bytes=N"
        ):
            run_burst(model, at(pool, 0, large(2 * MIB)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [large, late])
def test_what_runs_take_is_given_back_turn_after_turn(
    way: Callable[[PreparedModel, Request], None], make: Callable[[int], Model]
) -> None:
    with served(make(MIB), 3 * MIB) as (model, account, pool):
        for n in range(50):
            way(model, at(pool, n % 3, make(MIB)))
            account.returns_to(0)


# ---- what gives back -------------------------------------------------------------------------------------------------


def test_freed_slots_and_closed_bursts_give_back() -> None:
    with without_collector():
        with served(large(MIB)) as (model, account, pool), ExecutionBurstController.create(model) as burst:
            for _ in range(5):
                with Memory.ashmem(4096) as other, ExecutionBurstController.create(model) as second:
                    run_in_burst(burst, at(pool, 0, large(MIB)))
                    run_in_burst(burst, at(other, 0, large(MIB)))
                    run_in_burst(second, at(other, 0, large(MIB)))
                    assert account.used >= 3 * MIB
                    burst.free_memory(other)
                    until(lambda: account.used < 3 * MIB)
                    second.close()
                    until(lambda: account.used < 2 * MIB)
            assert account.used >= MIB


def test_plans_that_give_way_to_others_give_back() -> None:
    model = large(MIB)
    with served(model) as (prepared, account, pool), ExecutionBurstController.create(prepared) as burst:
        for n in range(MAX_PLANS + 20):
            run_in_burst(burst, at(pool, n, model))
            assert MIB * min(n + 1, MAX_PLANS) <= account.used < (MIB + 4096) * min(n + 1, MAX_PLANS) + MIB
        burst.close()
        account.returns_to(0)


def test_what_is_kept_for_later_runs_makes_room_for_others() -> None:
    """As many plans as anyone likes, in as many bursts: never more than the quota, and none of them fails."""
    model, quota = large(MIB), 5 * MIB
    with served(model, quota) as (prepared, account, pool):
        bursts = [ExecutionBurstController.create(prepared) for _ in range(4)]
        bound = [burst.bind(at(pool, n, model)) for burst in bursts for n in range(8)]
        for _ in range(3):
            for each in bound:
                each.run()
                assert 0 < account.used <= quota
        for burst in bursts:
            burst.close()
        account.returns_to(0)


# ---- one budget ------------------------------------------------------------------------------------------------------


def widened(b: ModelBuilder, x: Operand, nbytes: int) -> Operand:
    return b.tile(x, [nbytes // 4])


def narrowed(b: ModelBuilder, x: Operand) -> Operand:
    return b.reduce_max(x, [0], keep=True)


def nested(levels: int, nbytes: int) -> Model:
    """IFs inside each other, each beside a tensor of so many bytes that its branch reads."""
    model = built([TRUTH, ONE], lambda b, c, x: narrowed(b, widened(b, x, nbytes)))
    for _ in range(levels - 1):
        model = built(
            [TRUTH, ONE],
            lambda b, c, x, inner=model: b.branch(c, inner, inner, [c, narrowed(b, widened(b, x, nbytes))]),
        )
    return built([TRUTH, ONE], lambda b, c, x: b.branch(c, model, model, [c, x]))


@pytest.mark.check
def test_models_inside_models_share_one_budget() -> None:
    """Each level alone takes a quarter of what an execution may take."""
    part = 60 * MIB
    for levels, wanted in ((4, ErrorStatus.NONE), (5, ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT)):
        model = nested(levels, part)
        with served(model) as (prepared, account, pool):
            result = prepared.execute_synchronously(at(pool, 0, model))
            assert result[0] is wanted, reason_of(result)
            if wanted is not ErrorStatus.NONE:
                assert re.search("results take more than 268435456 bytes", reason_of(result))
            account.returns_to(0)


def test_a_loop_takes_no_more_than_its_values_and_one_turn() -> None:
    """200 turns, each of which gives a tensor of 1 MiB to the next, and makes another one on the way."""
    count, wide = OperandDesc(OperandType.TENSOR_INT32, (1,)), OperandDesc(F32, (MIB // 4,))
    less = built([count, wide], lambda b, n, x: b.less(n, np.int32([200])))

    def turn(b: ModelBuilder, n: Operand, x: Operand) -> tuple[Operand, Operand]:
        one = narrowed(b, widened(b, narrowed(b, x), MIB))
        return b.add(n, np.int32([1])), widened(b, one, MIB)

    def whole(b: ModelBuilder, n: Operand, x: Operand) -> tuple[Operand, Operand]:
        given, last = b.loop(less, built([count, wide], turn), [n, widened(b, x, MIB)])
        return given, narrowed(b, last)

    model = built([count, ONE], whole)
    with served(model, 5 * MIB) as (prepared, account, pool):
        result = prepared.execute_synchronously(at(pool, 0, model), RunOptions(loop_timeout_ns=15 * 10**9))
        assert result[0] is ErrorStatus.NONE, reason_of(result)
        account.returns_to(0)


# ---- other devices ---------------------------------------------------------------------------------------------------


@declare(inputs=[Tensor("x", "float32", (4,))], outputs=[Tensor("y", "float32", (1,))])
def largest(x: Any) -> Any:
    return x.max(keepdims=True)


@pytest.mark.parametrize("kind", ["noop", "function"])
def test_devices_that_keep_nothing_count_nothing(kind: str) -> None:
    device: Device = NoopDevice()
    model = large(MIB)
    if kind == "function":
        device = create_device("nnburst-function:call=test_working_memory:largest")
        model = device.import_model("name:largest").model
    with served(model, 0, device) as (prepared, account, pool):
        run_burst(prepared, at(pool, 0, large(MIB)))
        assert account.used == 0


def test_arguments_of_one_step_count() -> None:
    model = relu((MIB // 4,))
    with served(model, device=NoopDevice()) as (prepared, account, _), Memory.ashmem(4 * MIB) as pool:
        x, y = (RequestArgument(False, DataLocation(0, n * MIB, 2 * MIB)) for n in (0, 2))
        with ExecutionBurstController.create(prepared) as burst:
            run_in_burst(burst, Request((x,), (y,), (pool, Steps(2))))
            assert 2 * MIB <= account.used < 3 * MIB


def test_copies_of_memory_that_is_not_mapped_count(tmp_path: Path) -> None:
    model = relu((MIB // 4,))
    file = tmp_path / "plain"
    file.write_bytes(bytes(2 * MIB))
    with file.open("r+b") as opened, Memory.mmap_fd(opened.fileno(), 2 * MIB) as pool:
        with served(model, device=NoopDevice()) as (prepared, account, _):
            x, y = (RequestArgument(False, DataLocation(0, n * MIB, MIB)) for n in (0, 1))
            with ExecutionBurstController.create(prepared) as burst:
                run_in_burst(burst, Request((x,), (y,), (pool,)))
                assert 2 * MIB <= account.used < 3 * MIB


class Keeping(WrappedModel):
    """A device of somebody's that keeps a megabyte for each request."""

    def burst_executor(self) -> BurstExecutorWithCache:
        def bind(request: Request, options: RunOptions) -> Kernel:
            memory = WorkingMemory()
            memory.take(MIB)
            kept = bytearray(MIB)

            def run(memory: WorkingMemory = memory, kept: bytearray = kept) -> ExecutionResult | None:
                return None

            return run

        return BurstExecutorWithCache(bind)

    configure_execution_burst = PreparedModel.configure_execution_burst


class Alone(Keeping):
    """One without an executor, that runs another model."""

    burst_executor = PreparedModel.burst_executor  # type: ignore[assignment]


class Other(NoopDevice):
    def __init__(self, kind: type[WrappedModel], device: Device) -> None:
        super().__init__()
        self._kind, self._device = kind, device

    def prepare_model(self, model: Model, *arguments: Any) -> Any:
        return self._kind(self._device.prepare_model(model, *arguments))


@pytest.mark.parametrize("kind", [Keeping, Alone])
def test_what_devices_of_others_take_counts(kind: type[WrappedModel]) -> None:
    model = large(MIB)
    for quota in (2 * MIB, MIB // 2):
        with (
            served(model, quota, Other(kind, ReferenceDevice())) as (prepared, account, pool),
            ExecutionBurstController.create(prepared) as burst,
        ):
            if quota < MIB:
                with pytest.raises(ResourceExhausted, match=KNOB):
                    run_in_burst(burst, at(pool, 0, model))
            else:
                for n in range(5):
                    run_in_burst(burst, at(pool, n, model))
                assert account.used == (MIB if kind is Keeping else 0)
