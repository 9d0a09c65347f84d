"""One client of a service: what is served to it and what it owns."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..._core.deadline import Deadline
from ...devices import Device
from ...devices.alarm import ALARM_CLOCK
from ...errors import DeviceUnavailable, InvalidArgument, ResourceExhausted
from ...memory import check_pools
from ...model import Model, Request
from ..connection.transport import Connection
from ..process.discovery import Peer
from ..wire.marshal import model_from_wire, request_from_wire, total_size
from ..wire.packets import FdBundle
from ..wire.values import Sandbox, WireMemory, WireModel, WireRequest
from .hosted import HostedFenced, close_all
from .object_table import ObjectTable
from .quotas import Charge, Ledger

if TYPE_CHECKING:
    from ...burst import BurstContext, Flow
    from ...watch import Page
    from .faults import FaultPoints


@dataclass(frozen=True)
class Offer:
    """What a service has for all of its clients.

    Attributes:
        devices: In the order in which clients see them.
        page: Where it counts what it does; None: nowhere.
        max_run: Seconds that a run may take; None for no limit.
        max_compile: Seconds that reading and compiling a model may take; None for no limit.
        faults: What its client may order; None for nothing.
        sandbox: What keeps the service in.
        apart: Numbers of the devices that only its broker uses here; others have a process of their own for them.
    """

    devices: tuple[Device, ...]
    page: Page | None
    max_run: float | None
    max_compile: float | None
    faults: FaultPoints | None
    sandbox: Sandbox
    apart: frozenset[int] = frozenset()


class Client:
    """What one client of a service may use, and what it owns.

    Attributes:
        flow: Of its bursts' requests; None once it has gone, or for a thread for each burst.
        tokens: Of the buffers that it owns: it may name no others.
        bursts: That it has open.
        fenced: Executions that have not ended.
        peer: Its process id (0 if it is in another pid namespace) and its user.
        is_broker: Whether it is the broker whose worker this process is.
    """

    connection: Connection

    def __init__(self, offer: Offer, ledger: Ledger, flow: Flow | None, peer: Peer, *, is_broker: bool = False) -> None:
        self.offer = offer
        self.is_broker = is_broker
        self.ledger = ledger
        self.flow = flow
        self.objects = ObjectTable(self.account)
        self.tokens: set[int] = set()
        self.fenced: set[HostedFenced] = set()
        self.bursts: set[BurstContext] = set()
        self.peer = peer.pid, peer.uid
        self.same_user = peer.uid == os.geteuid()

    def account(self, nbytes: int, n_fds: int = 0) -> Callable[[], None]:
        """Charge working memory; where that would be too much, what is kept for later runs goes first."""
        try:
            return self.ledger.charge(working_bytes=nbytes, fds=n_fds).release
        except ResourceExhausted:
            for context in tuple(self.bursts):
                context.forget_plans()
            return self.ledger.charge(working_bytes=nbytes, fds=n_fds).release

    charge_answer = account

    def charge_for(self, pools: Sequence[WireMemory], fds: FdBundle, **more: int) -> Charge:
        """Charge what a message hands over."""
        return self.ledger.charge(mapped_bytes=total_size(pools), fds=len(fds), **more)

    def model(self, stack: contextlib.ExitStack, wire: WireModel, fds: FdBundle, **more: int) -> Model:
        """Take in a model, whose pools are closed with the stack."""
        stack.enter_context(self.charge_for(wire.pools, fds, **more))
        model = model_from_wire(wire, fds, self.same_user)
        stack.callback(close_all, model.pools)
        return model

    def request(self, stack: contextlib.ExitStack, wire: WireRequest, fds: FdBundle) -> Request:
        """Take in a request, whose memories are closed with the stack."""
        stack.enter_context(self.charge_for(wire.pools, fds))
        request = request_from_wire(wire, fds, self.tokens, self.same_user)
        stack.callback(close_all, request.pools)
        check_pools(request.pools, "request")
        return request

    def overdue(self) -> None:
        """End this process: a model takes too long, and nothing else ends that."""
        raise NotImplementedError

    def limited(self) -> contextlib.AbstractContextManager[None]:
        """Limit the time of reading and compiling a model. The broker's are the operator's."""
        if self.offer.max_compile is None or self.is_broker:
            return contextlib.nullcontext()
        return ALARM_CLOCK.at(Deadline.after(self.offer.max_compile).at_ns, self.overdue)

    def require_broker(self) -> None:
        """Refuse an order of another client's."""
        if not self.is_broker:
            raise InvalidArgument("only the broker of a service may ask that of its workers")

    def device(self, number: int) -> Device:
        if number >= len(self.offer.devices):
            raise DeviceUnavailable(f"there is no device {number}: this service has {len(self.offer.devices)}")
        if number in self.offer.apart and not self.is_broker:
            raise DeviceUnavailable(
                f"{self.offer.devices[number].name} runs models of a client's own in a process of its user's: run the "
                "same nnburst on both sides"
            )
        return self.offer.devices[number]
