"""Laws of messages: their order, how many are under way, and what they must not depend on.

`Spy` stands between a transport and its backend and records every message that leaves a rank.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Kind, Loopback, Pairwise, Tag, Transport, Work, on_threads
from collectives.backend import Backend, Pending
from collectives.backends.threads import Interference
from collectives.messages import HEADER_BYTES
from collectives.peer_links import ACK, ACK_PORT, PORTS
from zero import ZeroOptimizer
from zero.core.stage import STAGES

from ..contract.test_steps import (
    ALL_STAGES,
    ARGUMENTS,
    STEPS,
    Result,
    assert_plain_loop,
    everything_but_step,
    fill_memory,
    finished,
    nothing,
    one_step,
    trained,
)
from ..support.models import Odd, build

HEADERS = 0


# -- order and number -------------------------------------------------------------------------------------------------


class Recorded:
    """`Pairwise` that records each rank's launches, and the number of reductions under way."""

    name, exact = "recorded", True

    def __init__(self, transport: Transport) -> None:
        self.transport, self._inner, self._flying = transport, Pairwise(transport), 0
        self.most, self.launched = 0, list[tuple[str, int, int, str]]()

    def reduce_scatter(self, source: Tensor, bounds: Any, out: Tensor, *, start: Tensor | None, tag: Tag) -> Work:
        self._flying += 1
        self.most = max(self.most, self._flying)
        self.launched.append((tag.kind.name, tag.round, tag.index, tag.label))
        return _Flight(self, self._inner.reduce_scatter(source, bounds, out, start=start, tag=tag))

    def all_gather(self, buffer: Tensor, bounds: Any, *, tag: Tag) -> Work:
        self.launched.append((tag.kind.name, tag.round, tag.index, tag.label))
        return self._inner.all_gather(buffer, bounds, tag=tag)


class _Flight:
    def __init__(self, recorded: Recorded, work: Work) -> None:
        self._recorded, self._work, self._flying = recorded, work, True

    def wait(self) -> None:
        self._work.wait()
        self._recorded._flying -= self._flying
        self._flying = False


class Fan(nn.Module):
    """Layers side by side, which a backward reaches in an order that the caller chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        for parameter in self.parameters():
            nn.init.constant_(parameter, 0.5)

    def forward(self, order: Sequence[int]) -> Tensor:
        x = torch.ones(2, 4)
        for number in order:
            x = torch.tanh(self.layers[number](x))
        return x.sum()


@ALL_STAGES
@pytest.mark.parametrize("world_size", [2, 5])
@pytest.mark.by_default("2-2", "5-3")
def test_every_rank_launches_every_bucket_in_layout_order(stage: int, world_size: int) -> None:
    """Gradients come in another order on each rank, and some never do.

    With five ranks most slices are empty. No more buckets are under way than there are buffers.
    """

    def program(transport: Transport) -> tuple[Recorded, list[int]]:
        model, readiness = Fan(), list[int]()
        made: list[Recorded] = []
        optimizer = ZeroOptimizer(
            model,
            stage=stage,
            process_group=transport,
            bucket_cap_mb=1e-6,
            collective=lambda inner: made.append(Recorded(inner)) or made[0],  # type: ignore[func-returns-value]
        )
        for number, layer in enumerate(model.layers):
            layer.weight.register_post_accumulate_grad_hook(lambda _, n=number: readiness.append(n))
        for step in range(3):
            order = list(range(6))
            random.Random(step if stage == 3 else 10 * step + transport.rank).shuffle(order)
            model(order if stage == 3 else order[transport.rank :]).backward()
            optimizer.step()
            optimizer.zero_grad()
        return made[0], readiness

    results = on_threads(world_size, program, timeout=10)
    first = results[0][0].launched
    assert all(recorded.launched == first for recorded, _ in results)
    rounds: dict[int, list[int]] = {}
    for kind, round_, index, _ in first:
        if kind == Kind.REDUCE_SCATTER.name:
            rounds.setdefault(round_, []).append(index)
    assert list(rounds.values()) == [list(range(12))] * 3
    assert any(readiness != sorted(readiness, reverse=True) for _, readiness in results)
    if stage < 3:
        assert len({tuple(readiness) for _, readiness in results}) > 1
    assert {recorded.most for recorded, _ in results} == {1 if stage > 1 else 2}


# -- delays -----------------------------------------------------------------------------------------------------------


class Eager(Pairwise):
    """No overlap: each collective is awaited at once."""

    def reduce_scatter(self, *arguments: Any, **named: Any) -> Work:
        work = super().reduce_scatter(*arguments, **named)
        work.wait()
        return work

    def all_gather(self, *arguments: Any, **named: Any) -> Work:
        work = super().all_gather(*arguments, **named)
        work.wait()
        return work


class Sleepy(Pairwise):
    """Random delays before each collective and each wait."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self._random = random.Random(transport.rank)

    def nap(self) -> None:
        time.sleep(self._random.random() * 1e-3)

    def reduce_scatter(self, *arguments: Any, **named: Any) -> Work:
        self.nap()
        return _Late(self, super().reduce_scatter(*arguments, **named))

    def all_gather(self, *arguments: Any, **named: Any) -> Work:
        self.nap()
        return _Late(self, super().all_gather(*arguments, **named))


@dataclass(frozen=True)
class _Late:
    sleepy: Sleepy
    work: Work

    def wait(self) -> None:
        self.sleepy.nap()
        self.work.wait()


def sleepy_hooks(moment: str, model: Odd, optimizer: ZeroOptimizer) -> None:
    """Add random delays to every hook of autograd and of modules."""
    if moment != "built":
        return
    source = random.Random(optimizer.rank)

    def nap(*_: Any) -> None:
        time.sleep(source.random() * 5e-4)

    for part in model.modules():
        part.register_forward_pre_hook(nap)
        part.register_forward_hook(nap)
        part.register_full_backward_hook(nap)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(nap)
            parameter.register_post_accumulate_grad_hook(nap)


def slow(rank: int, event: str) -> Interference:
    """Delay one rank in one kind of event."""

    def interfere(which: int, what: str, peer: int) -> None:
        if (which, what) == (rank, event):
            time.sleep(2e-4)

    return interfere


@ALL_STAGES
def test_without_overlap_the_bits_are_the_same(stage: int) -> None:
    assert_plain_loop(trained(stage, collective=Eager))


@ALL_STAGES
@pytest.mark.parametrize("event", ["send", "recv", "wait"])
@pytest.mark.by_default("recv-2")
def test_a_rank_that_is_slow_in_every_message_changes_no_bit(stage: int, event: str) -> None:
    for rank in range(2):
        assert_plain_loop(trained(stage, group=Loopback(2, timeout=10, interfere=slow(rank, event))))


@ALL_STAGES
@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@pytest.mark.by_default("2")
def test_delays_in_collectives_and_hooks_change_no_bit(stage: int) -> None:
    assert_plain_loop(trained(stage, sleepy_hooks, collective=Sleepy))


# -- the messages themselves ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Message:
    to: int
    port: int
    size: int
    content: str


class Spy(Backend):
    """A backend that records the messages of this rank on open channels.

    Opening itself is left out: it draws a random number.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend, self.messages = backend, list[Message]()
        self.name, self.timeout = self._backend.name, self._backend.timeout
        self.rank, self.world_size = self._backend.rank, self._backend.world_size

    def send(self, tensor: Tensor, to: int, slot: int) -> Pending:
        if slot >= PORTS:
            digest = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
            self.messages.append(Message(to, slot % PORTS, tensor.numel(), digest))
        return self._backend.send(tensor, to, slot)

    def recv(self, tensor: Tensor, source: int, slot: int) -> Pending:
        return self._backend.recv(tensor, source, slot)


def wire(stage: int) -> tuple[list[list[Message]], list[Any]]:
    """Train on two ranks with every kind of call in between; return all that each rank sends, and its traffic."""
    models = [build(rank) for rank in range(2)]

    def program(transport: Transport) -> tuple[list[Message], Any]:
        spy, model, norms = Spy(transport.backend), models[transport.rank], list[Tensor]()
        given = {**ARGUMENTS, "collective": "pairwise"}
        optimizer = ZeroOptimizer(model, stage=stage, process_group=Transport(spy), **given)
        for step in range(2):
            one_step(model, optimizer, step, norms, nothing)
        optimizer.check_replicas()
        finished(model, optimizer, norms)
        return spy.messages, optimizer.traffic

    results = on_threads(2, program, timeout=10)
    return [messages for messages, _ in results], [traffic for _, traffic in results]


def digest_of_the_wire() -> list[list[str]]:
    with pytest.MonkeyPatch.context() as patch:
        fill_memory(patch, 0)  # padding is sent, too
        return [
            [hashlib.sha256(repr(messages).encode()).hexdigest() for messages in wire(stage)[0]] for stage in STAGES
        ]


PROGRAM = """
import json, torch
kept = [bytearray(n) for n in range(9999)]
from tests.collectives.test_wire import digest_of_the_wire
torch.set_num_threads(1)
print(json.dumps([hash("zero"), digest_of_the_wire()]))
"""


def test_the_wire_knows_neither_hashes_of_strings_nor_addresses() -> None:
    """Another interpreter sends the same bytes in the same order.

    In it sets of strings have another order, and objects other addresses.
    """
    command = [sys.executable, "-c", PROGRAM]
    environment, root = {**os.environ, "PYTHONHASHSEED": "1234567"}, Path(__file__).resolve().parents[2]
    other = subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True)
    ours = digest_of_the_wire()
    told, theirs = json.loads(other.communicate(timeout=100)[0])
    assert told != hash("zero")
    assert theirs == ours


@ALL_STAGES
def test_traffic_is_what_the_backend_sent(stage: int) -> None:
    """Headers and control bytes are included, acks are not. The bytes that one rank sends are those that another
    receives."""
    sent, traffic = wire(stage)
    for messages, counted in zip(sent, traffic, strict=True):
        headers = [message for message in messages if message.port == HEADERS]
        assert len(headers) == counted.messages
        assert all(message.size == HEADER_BYTES for message in headers)
        assert all(message.size == ACK.size for message in messages if message.port == ACK_PORT)
        size = sum(message.size for message in messages if message.port != ACK_PORT)
        assert size == counted.payload_sent + counted.control_sent
    assert sum(t.payload_sent for t in traffic) == sum(t.payload_received for t in traffic) > 0
    assert sum(t.control_sent for t in traffic) == sum(t.control_received for t in traffic) > 0


# -- ranks of a group -------------------------------------------------------------------------------------------------


@ALL_STAGES
@pytest.mark.parametrize("ranks", [[1, 3], [3, 1]])
@pytest.mark.by_default("ranks0-2")
def test_two_halves_of_four_ranks_train_side_by_side(stage: int, ranks: list[int]) -> None:
    """All ranks are those of the group: its rank 0's values win, states go to its rank 1, and its order is its own."""
    models = [build(7) for _ in range(4)]
    for first in (ranks[0], 0):
        models[first].load_state_dict(build(0).state_dict())

    def program(transport: Transport) -> Result:
        group = transport.split(ranks if transport.rank in ranks else [0, 2])
        model, norms = models[transport.rank], list[Tensor]()
        optimizer = ZeroOptimizer(model, stage=stage, process_group=group, **ARGUMENTS)
        assert (optimizer.rank, optimizer.world_size) == (group.rank, 2)
        for step in range(STEPS):
            one_step(model, optimizer, step, norms, everything_but_step if (step, ranks) == (1, [3, 1]) else nothing)
        return finished(model, optimizer, norms)

    assert_plain_loop(on_threads(4, program, timeout=10))
