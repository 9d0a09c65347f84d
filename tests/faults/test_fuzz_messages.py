"""Every message of the table, wrong in every way, with descriptors of every kind: honest clients notice nothing."""

from __future__ import annotations

import contextlib
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import msgspec.inspect
import numpy as np
import pytest

import nnburst
from nnburst import Memory
from nnburst.errors import ErrorStatus
from nnburst.model.types import BufferDesc, BufferRole
from nnburst.service.connection.callbacks import CallbackRegistry
from nnburst.service.connection.pending import PendingCall
from nnburst.service.wire import protocol
from nnburst.service.wire.packets import FdBundle, Kind, Outgoing
from nnburst.service.wire.protocol import CALLS, MAX_INLINE, Call, Malformed, Side, decode_error, decode_request
from support import wire_page
from support.hostile import Descriptors, Values, encoded, mutated
from support.models import request_on, tiny_model
from support.services import Honest, RawConnection, Shared, header, plain
from support.waiting import PATIENCE

SERVED = [call for call in CALLS if call.side is Side.SERVICE]
TYPES = {call: msgspec.inspect.type_info(wire_page.struct(call.name)) for call in SERVED}
"""Of the page, not of the classes."""
LONG = 2 * MAX_INLINE
"""Bytes with which a message does not fit into a datagram."""
Recorded = tuple[str, Any, list[int]]


@pytest.fixture
def recorded(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Recorded]]:
    """The messages of a client that does a little of everything, in order, with copies of their descriptors."""
    found: list[Recorded] = []
    pack = PendingCall.pack

    def recording(pending: PendingCall) -> Outgoing:
        found.append((pending.call.name, plain(pending.body), [os.dup(fd) for fd in pending.fds.fds]))
        return pack(pending)

    with monkeypatch.context() as patch:
        patch.setattr(PendingCall, "pack", recording)
        do_a_little_of_everything(shared.address)
    yield found
    for _, _, fds in found:
        for fd in fds:
            os.close(fd)


def do_a_little_of_everything(address: str) -> None:
    with nnburst.connect(address) as service, Memory.ashmem(512) as pool:
        device = service.devices[0]
        model = tiny_model(256)
        device.get_supported_operations(model)
        prepared = device.prepare_model(model)
        assert prepared.execute_synchronously(request_on(pool))[0] is ErrorStatus.NONE
        with device.allocate(BufferDesc(), [prepared], [BufferRole(0, 0)], []) as buffer, Memory.ashmem(256) as memory:
            buffer.copy_from(memory)
            with device.allocate(BufferDesc(), [prepared], [BufferRole(0, 0)], []) as other:
                other.copy_buffer(buffer)
                other.copy_to(memory)
        fenced = prepared.execute_fenced(request_on(pool), [])
        fenced.fence.wait(PATIENCE)
        fenced.info()
        fenced.cancel()
        with service.session(model) as session:
            session.run(None, {session.get_inputs()[0].name: np.zeros(64, np.float32)})
            execution = session.bind()
            execution.run()
            execution.close()
        prepared.close()


class Attacker:
    """Sends one wrong message after the other, on a new connection whenever the service has ended the last."""

    def __init__(self, shared: Shared, recorded: list[Recorded], dice: random.Random, directory: Path) -> None:
        self.shared, self.recorded, self.dice = shared, recorded, dice
        self.values = Values(dice)
        self.descriptors = Descriptors(dice, directory)
        self.connection: RawConnection | None = None
        self.sent: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        self.is_unanswered = False
        """Whether the last message wanted no answer."""

    def attack(self, call: Call) -> None:
        """Send one message of a kind, and wait for an answer or the end: never for silence."""
        connection = self.connection or self._connect()
        body = self._body(call)
        fds = [self.descriptors.any(slow=False) for _ in range(self._count(body))]
        number = self.dice.choice([0, 1, 2, *[9] * 17, 2**32 - 1])
        dice = self.dice.random()
        head = header(number, len(fds))
        if dice < 0.02:
            head = header(
                number,
                max(0, len(fds) + self.dice.choice([-1, 0, 1, 250])),
                self.dice.randrange(4),
                self.dice.randrange(3),
            )
        elif dice < 0.03:
            head = head[: self.dice.randrange(8)]
        elif dice < 0.06:  # the body, or what announces it, in a descriptor
            body = self._spilled(body, fds)
            head = header(number, max(0, len(fds) - 1), flags=1)
        try:
            connection.send(head, body[:65000], fds)
        except ConnectionError:
            assert self.is_unanswered, f"disconnected before {call.name}"
        finally:
            self.descriptors.let_go(fds)
        self.sent[call.name] += 1
        answer = self._answer(connection) if number else "none wanted"
        # Who has sent more before it reads may lose the notice of the end.
        assert answer != "end" or self.is_unanswered, f"no reason for the end after {call.name}"
        self.answers[answer] += 1
        self.is_unanswered = not number
        if answer in ("end", "ending") or (number and self.dice.random() < 0.02):
            self._disconnect()

    def _answer(self, connection: RawConnection) -> str:
        """Read on until a call is answered or the connection has ended; what the service itself calls stays so."""
        while data := connection.answer():
            if data[0] == Kind.REPLY:
                return "reply"
            if data[0] == Kind.ERROR:
                assert decode_error(data[8:]).status, data
                return "error"
            call, message = decode_request(data[8:], Side.CLIENT)
            if call.name == "ending" and not message.callback:
                assert message.reason.startswith("malformed message: "), message
                return "ending"
        return "end"

    def _connect(self) -> RawConnection:
        """Be a client that has got some way: not even greeted, just greeted, or with models, buffers and bursts."""
        self.connection = connection = RawConnection(self.shared)
        self.is_unanswered = False
        how_far = self.dice.choice([0, 1, 1, 1, len(self.recorded) // 2, self.dice.randrange(len(self.recorded))])
        for i, (_, body, fds) in enumerate(self.recorded[:how_far]):
            connection.send(header(i + 1, len(fds)), encoded(body), fds)
            assert connection.answer()
        return connection

    def _disconnect(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def _body(self, call: Call) -> bytes:
        seeds = [body for name, body, _ in self.recorded if name == call.name]
        if self.dice.random() < 0.01:
            return self.dice.choice([b"", b"\x91" * 5000, b"\xc1", b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff"])
        for _ in range(10):
            value = self.dice.choice(seeds) if seeds and self.dice.random() < 0.6 else self.values.of(TYPES[call])
            for _ in range(self.dice.choice([0, 1, 1, 1, 2])):
                value = mutated(self.dice, value)
            with contextlib.suppress(OverflowError):  # an integer that MessagePack does not have
                body = encoded(value)
                with contextlib.suppress(Malformed):
                    _, message = decode_request(body, Side.SERVICE)
                    if getattr(message, "uid", None) != os.geteuid():  # else it is right, and ends the honest client
                        return body
                    continue
                if self.dice.random() < 0.2:  # most of them get further than the decoder
                    return body
        return encoded({"call": call.name})

    def _count(self, body: bytes) -> int:
        """Return how many descriptors to send: mostly as many as the message needs."""
        with contextlib.suppress(Malformed):
            call, message = decode_request(body, Side.SERVICE)
            if self.dice.random() < 0.95:
                return min(
                    call.request_fds(message), 252
                )  # and one more for a body, with which the kernel takes no more
        return self.dice.choice([0, 1, 2, 30])

    def _spilled(self, body: bytes, fds: list[int]) -> bytes:
        if self.dice.random() < 0.5:
            outgoing = Outgoing(Kind.REQUEST, 1, body + bytes(LONG))  # owns a descriptor as it should be
            fds.append(os.dup(outgoing._fds.fds[-1]))
            outgoing.close()
        else:
            fds.append(self.descriptors.any())
        return self.dice.choice([len(body) + LONG, 0, 2**24, 2**64 - 1, len(body)]).to_bytes(8, "little")

    def close(self) -> None:
        self._disconnect()
        self.descriptors.close()


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param(2000, marks=pytest.mark.check, id="some"),
        pytest.param(100_000, marks=[pytest.mark.soak, pytest.mark.timeout(0)], id="many"),
    ],
)
def test_honest_clients_notice_nothing_of_wrong_messages(
    shared: Shared, honest: Honest, recorded: list[Recorded], messages: int, tmp_path: Path
) -> None:
    dice = random.Random(os.environ.get("NNBURST_TEST_SEED", "7"))
    before, memory, right = shared.descriptors(), shared.resident(), honest.right()
    attacker = Attacker(shared, recorded, dice, tmp_path)
    try:
        for i in range(messages):
            attacker.attack(SERVED[i % len(SERVED)])
            if i % 500 == 499:
                honest.goes_on()
    finally:
        attacker.close()
    honest.goes_on()
    assert attacker.sent.keys() == {call.name for call in SERVED}
    assert attacker.answers.keys() >= {"reply", "error", "ending"}
    shared.gives_back(before)
    print(attacker.answers, honest.right() - right, (shared.resident() - memory) >> 10)


@pytest.mark.parametrize(
    "rounds",
    [pytest.param(40, marks=pytest.mark.check), pytest.param(2000, marks=[pytest.mark.soak, pytest.mark.timeout(0)])],
)
def test_honest_clients_notice_nothing_of_wrong_answers_to_the_service(
    shared: Shared, honest: Honest, rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service asks its clients for memory: the right model, run with the wrong answer."""
    dice = random.Random(os.environ.get("NNBURST_TEST_SEED", "7"))
    before, descriptors, outcomes = shared.descriptors(), Descriptors(dice, tmp_path), Counter[str]()
    encode_reply, on_get_memories = protocol.encode_reply, CallbackRegistry.on_get_memories

    def wrong_body(call: Call, reply: Any) -> bytes:
        body = encode_reply(call, reply)
        return encoded(mutated(dice, plain(body))) if call.side is Side.CLIENT and dice.random() < 0.6 else body

    def wrong_fds(registry: CallbackRegistry, message: Any, fds: FdBundle) -> tuple[Any, FdBundle]:
        reply, right = on_get_memories(registry, message, fds)
        if dice.random() < 0.4:
            return reply, right
        right.close()
        count = max(0, len(reply.memories) + dice.choice([0, 0, 0, 1, -1]))
        return reply, FdBundle(descriptors.any(slow=False) for _ in range(count))

    monkeypatch.setattr(protocol, "encode_reply", wrong_body)
    monkeypatch.setattr(CallbackRegistry, "on_get_memories", wrong_fds)
    try:
        for i in range(rounds):
            with (
                nnburst.connect(shared.address) as service,
                service.session(tiny_model(256), timeout=PATIENCE) as session,
            ):
                try:
                    session.run(None, {session.get_inputs()[0].name: np.full(64, i, np.float32)})
                    outcomes["answered"] += 1
                except nnburst.NNBurstError as error:
                    outcomes[type(error).__name__] += 1
                    # A client that answers MISSED_DEADLINE gets that; but no run is without an end.
                    assert "a late one will be dropped" not in str(error), outcomes
            if i % 20 == 19:
                honest.goes_on()
    finally:
        descriptors.close()
    assert {"answered", "DeadObject"} <= outcomes.keys(), outcomes
    shared.gives_back(before)
