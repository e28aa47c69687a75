"""Messages are the same whatever delays them, whoever sends them and wherever objects lie, and are all counted."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Algorithm, Kind, Loopback, Pairwise, Ring, Shared, Tag, Traffic, Transport, Work, on_threads
from collectives.backend import Backend, Pending
from collectives.links.messenger import ACK, ACK_PORT, PORTS
from collectives.messages import HEADER_BYTES
from collectives.pool import Pool

from ..support.carried import between_hosts, reduction
from ..support.programs import Program, Round, Step, compare, run_rank
from ..support.rows import rows
from ..support.sockets import Wire

HEADERS = 0
ALL_STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
STEPS = (Step(clips=((0.5, 2.0),)), Step((Round(sync=False), Round()), clear="zeros"))


def check(program: Any, group: Loopback[Any] | None = None) -> None:
    """Run a program on threads, and compare it with the plain loop."""
    group = group or Loopback(program.world_size)
    compare(program, group.run(lambda transport: run_rank(program, transport)))


class Recorded(Pairwise):
    """Records each rank's launches, and the number of reductions under way."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self.flying, self.most, self.launched = 0, 0, list[tuple[str, int, int, str]]()

    def reduce_scatter(self, *arguments: Any, tag: Tag, **named: Any) -> Work:
        self.flying += 1
        self.most = max(self.most, self.flying)
        self.launched.append((tag.kind.name, tag.round, tag.index, tag.label))
        work, under_way = super().reduce_scatter(*arguments, tag=tag, **named), [1]

        def wait() -> None:
            work.wait()
            self.flying -= under_way.pop() if under_way else 0

        return SimpleNamespace(wait=wait)

    def all_gather(self, *arguments: Any, tag: Tag, **named: Any) -> Work:
        self.launched.append((tag.kind.name, tag.round, tag.index, tag.label))
        return super().all_gather(*arguments, tag=tag, **named)


@pytest.mark.law("buffers in flight")
@pytest.mark.law("every rank enters")
@pytest.mark.law("launch order")
@pytest.mark.parametrize(
    "case",
    rows([(0, 2), (1, 5)], [(2, 2), (3, 5)]),
    ids=str,
)
def test_every_rank_launches_every_bucket_in_layout_order(case: tuple[int, int]) -> None:
    """Gradients come in another order on each rank, and some never do.

    With five ranks most slices are empty. No more buckets are under way than there are buffers.
    """
    stage, world_size = case
    made: dict[int, Recorded] = {}

    def recorded(transport: Transport) -> Recorded:
        return made.setdefault(transport.rank, Recorded(transport))

    check(Program(world_size, stage, collective=recorded, steps=STEPS))  # type: ignore[arg-type]
    first = made[0].launched
    assert all(made[rank].launched == first for rank in range(world_size))
    rounds: dict[int, list[int]] = {}
    for kind, round_, index, _ in first:
        if kind == Kind.REDUCE_SCATTER.name:
            rounds.setdefault(round_, []).append(index)
    orders = list(rounds.values())
    assert len(orders[0]) > 3
    assert orders == [sorted(set(orders[0]))] * len(orders), "a bucket of frozen parameters is left out"
    assert {recorded.most for recorded in made.values()} == {1 if stage > 1 else 2}


@pytest.mark.law("delays")
@pytest.mark.parametrize("stage", rows([1], [0, 2, 3]))
@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_delays_in_collectives_and_hooks_change_no_bit(stage: int) -> None:
    """Delays are random, before each message and in every hook of modules."""
    source = random.Random(stage)

    def nap(*_: Any) -> None:
        time.sleep(source.random() * 2e-4)

    hooks = nn.modules.module
    with (
        hooks.register_module_forward_pre_hook(nap),
        hooks.register_module_forward_hook(nap),
        hooks.register_module_full_backward_hook(nap),
    ):
        check(Program(2, stage, steps=STEPS), Loopback(2, interfere=nap))


Message = tuple[int, int, int, str]  # to whom, port, size, digest


class Spy(Wire):
    """Records the messages of this rank on open channels. Opening itself is left out: it draws a random number."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.name, self.messages = backend.name, list[Message]()

    def send(self, tensor: Tensor, to: int, slot: int) -> Pending:
        if slot >= PORTS:
            digest = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
            self.messages.append((to, slot % PORTS, tensor.numel(), digest))
        return super().send(tensor, to, slot)


def wire(stage: int) -> list[tuple[list[Message], Any]]:
    """Train on two ranks; return all that each rank sends, and the traffic of its transport."""

    def program(transport: Transport) -> tuple[list[Message], Any]:
        spy, made = Spy(transport.backend), list[Pairwise]()
        collective = lambda inner: made.append(Pairwise(inner)) or made[0]  # noqa: E731 - counts this one's messages
        run_rank(Program(2, stage, collective=collective, steps=STEPS), Transport(spy))  # type: ignore
        return spy.messages, made[0].transport.traffic

    return on_threads(2, program)


def zeroed(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *given: allocate(*given).zero_()


def digest_of_the_wire() -> list[list[str]]:
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((Pool, "take"), (Transport, "empty")):  # padding is sent, too
            patch.setattr(owner, name, zeroed(getattr(owner, name)))
        return [
            [hashlib.sha256(repr(messages).encode()).hexdigest() for messages, _ in wire(stage)] for stage in range(4)
        ]


PROGRAM = """
import json, torch
kept = [bytearray(n) for n in range(9999)]
from tests.collectives.test_wire import digest_of_the_wire
torch.set_num_threads(1)
print(json.dumps([hash("zero"), digest_of_the_wire()]))
"""


@pytest.mark.law("names on the wire")
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


def assert_balanced(traffic: list[Traffic]) -> None:
    """Assert that the bytes that ranks send are those that others receive."""
    assert sum(t.payload_sent for t in traffic) == sum(t.payload_received for t in traffic) > 0
    assert sum(t.control_sent for t in traffic) == sum(t.control_received for t in traffic) > 0


@pytest.mark.law("traffic")
@pytest.mark.parametrize("stage", rows([1], [0, 2, 3]))
def test_traffic_is_what_the_backend_sent(stage: int) -> None:
    """Headers and control bytes are included, acks are not. The bytes that one rank sends are those that another
    receives."""
    found = wire(stage)
    for messages, counted in found:
        assert all(size for _, _, size, _ in messages), "nothing without bytes is sent"
        assert [port for _, port, _, _ in messages].count(HEADERS) == counted.messages
        assert {size for _, port, size, _ in messages if port == HEADERS} == {HEADER_BYTES}
        assert {size for _, port, size, _ in messages if port == ACK_PORT} <= {ACK.size}
        sent = sum(size for _, port, size, _ in messages if port != ACK_PORT)
        assert sent == counted.payload_sent + counted.control_sent
    assert_balanced([counted for _, counted in found])


@pytest.mark.parametrize("algorithm", [Pairwise, Ring, Shared, between_hosts])
def test_every_algorithm_counts_as_received_what_it_counts_as_sent(algorithm: Algorithm) -> None:
    bounds = [0, 3, 5, 9]

    def program(transport: Transport) -> Traffic:
        collective, whole = algorithm(transport), torch.ones(9)
        own = whole[bounds[transport.rank] : bounds[transport.rank + 1]]
        collective.reduce_scatter(whole, bounds, own, start=None, tag=reduction(round_=1)).wait()
        collective.all_gather(whole, bounds, tag=Tag(Kind.ALL_GATHER, "whole", 1)).wait()
        return collective.transport.traffic

    assert_balanced(on_threads(3, program))
