"""What a client asks of fenced executions."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, ClassVar

from ..._core.deadline import limit_ns
from ...burst import under_token
from ...devices import Fence, FencedExecution
from ...devices.deadline import earlier
from ..wire import protocol as calls
from ..wire.packets import FdBundle
from .models import HostedModel

if TYPE_CHECKING:
    from .host import Client


class HostedFenced:
    """A fenced execution in a connection's table. It goes once it has ended and its client has let go."""

    what: ClassVar[str] = "fenced execution"

    def __init__(self) -> None:
        self._execution: FencedExecution | None = None
        self._cancelled = False

    @property
    def execution(self) -> FencedExecution:
        assert self._execution is not None  # its client does not know its number before
        return self._execution

    def launched(self, execution: FencedExecution) -> None:
        """Tell what was launched."""
        self._execution = execution
        if self._cancelled:  # meanwhile
            execution.cancel()

    def cancel(self) -> None:
        """Have it not begin."""
        self._cancelled = True
        if self._execution is not None:
            self._execution.cancel()


def on_execute_fenced(
    client: Client, message: calls.ExecuteFenced, fds: FdBundle
) -> tuple[calls.ExecuteFencedReply, FdBundle]:
    """Launch an execution that waits for fences; neither this thread nor another that serves calls waits."""
    with contextlib.ExitStack() as undo, contextlib.ExitStack() as fences:
        running = undo.enter_context(contextlib.ExitStack())  # what it needs until it has ended
        model = running.enter_context(client.objects.lease(message.prepared_model, HostedModel))
        request = client.request(running, message.request, fds)
        wait_for = [fences.enter_context(Fence(fd)) for fd in fds.fds[: message.fences]]
        hosted = HostedFenced()
        charge = client.ledger.charge(requests=1)  # until its client lets go of it and it has ended
        number = client.objects.add(hosted, charge.release)
        undo.callback(client.objects.remove, number)
        running.enter_context(client.objects.lease(number, HostedFenced))
        running.callback(client.fenced.discard, hosted)
        client.fenced.add(hosted)
        undo.callback(hosted.cancel)
        on_end = running.pop_all().close
        try:
            duration_ns = earlier(message.duration_ns, limit_ns(client.host.max_run))
            with under_token(client.objects.token):
                run = model.served.execute_fenced(request, wait_for, message.options, duration_ns, on_end)
        except BaseException:
            on_end()
            raise
        hosted.launched(run)
        fence = FdBundle((run.fence.detach_copy(),))
        undo.pop_all()
        return calls.ExecuteFencedReply(number), fence


def on_get_fenced_info(client: Client, message: calls.GetFencedInfo, fds: FdBundle) -> calls.GetFencedInfoReply:
    """Say how a fenced execution ended."""
    with client.objects.lease(message.execution, HostedFenced) as hosted:
        info = hosted.execution.info()
    return calls.GetFencedInfoReply(int(info.status), info.launched, info.fenced, calls.sendable(info.reason))


def on_cancel_fenced(client: Client, message: calls.CancelFenced, fds: FdBundle) -> calls.Done:
    """Have a fenced execution not begin."""
    with client.objects.lease(message.execution, HostedFenced) as hosted:
        hosted.execution.cancel()
    return calls.Done()
