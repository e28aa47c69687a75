"""Trainings whose ranks part: each divergence is named on every rank in time, and a late rank changes nothing.

    python -m tests.ledger [DIVERGENCES, by default 60 [LATE, by default 6 [LIMIT in seconds, by default 0.5]]]

draws stages, ranks, threads or processes, a rank and a moment, and what this rank does there: it runs units in another
order, or another unit, raises, runs out of memory, is lost, or ends. Every other rank must raise within the sentinels'
limit and `SOON`. Then come ranks that are late by three limits, or whose thread holds the interpreter for 12 seconds:
nothing may be raised, and the weights are those of a training without delay.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from collectives import CollectiveError, Transport
from collectives.launches.sentinel import SENTINEL
from zero import ZeroOptimizer

from .support.models import seeded
from .support.parts import parts_of
from .support.processes import PATIENCE, Group
from .support.streamed import Mail, StreamedGloo, StreamedLoopback

SOON = 2.0  # seconds beyond the limit in which every rank raises
STEPS, WIDTH, BLOCKS = 4, 8, 4
DIVERGENCES = ("order", "unit", "raise", "memory", "lost", "ends")
LATE = ("late", "holds")


class Lost(BaseException):
    """Ends a rank that is a thread, of which nothing is heard any more."""


@dataclass(frozen=True)
class Case:
    """A training in which rank ``victim`` does something else in a step, before block ``block`` of its forward."""

    what: str  # one of `DIVERGENCES`, one of `LATE`, "stops", or nothing
    stage: int
    ranks: int
    victim: int
    step: int
    block: int
    rounds: int = 1  # backwards of a step
    clips: bool = True
    processes: bool = False  # else threads
    limit: float = 0.5  # of the sentinels, in seconds
    patience: float = PATIENCE  # of the group, in seconds


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))

    def forward(self, x: Tensor, order: Sequence[int], before: Callable[[int], None]) -> Tensor:
        for place, block in enumerate(order):
            before(place)
            x = self.blocks[block](x).tanh()
        return x


@dataclass(frozen=True)
class Seen:
    """What a rank saw: its error, empty if it raised none; when, by the clock of all processes; a digest of weights."""

    error: str
    at: float
    digest: str = ""


def order_of(case: Case, diverges: bool) -> list[int]:
    order = list(range(BLOCKS))
    if diverges and case.what == "order":
        other = (case.block + 1) % BLOCKS
        order[case.block], order[other] = order[other], order[case.block]
    if diverges and case.what == "unit":
        order[case.block] = (case.block + 2) % BLOCKS
    return order


def end(case: Case, transport: Transport) -> None:
    match case.what:
        case "raise":
            transport.abort(f"{transport.rank_label}: KeyError in the step of the library")
            raise KeyError("a bug")
        case "memory":
            raise torch.OutOfMemoryError("no memory is left for a gather")
        case "lost" | "ends" | "stops" if not case.processes:
            raise Lost
        case "lost":
            os._exit(1)
        case "ends":
            sys.exit(1)
        case "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "late":
            time.sleep(3 * case.limit)
        case "holds":
            ctypes.PyDLL(None).sleep(12)  # the thread holds the interpreter


def train(case: Case, transport: Transport, diverging: Callable[[], None]) -> Seen:
    """Train, and return what this rank saw. ``diverging``: is called at the moment of the divergence."""
    model = seeded(0, Model)
    optimizer_of: Callable[..., ZeroOptimizer] = ZeroOptimizer
    optimizer = optimizer_of(
        model,
        torch.optim.SGD,
        stage=case.stage,
        process_group=transport,
        collective="all_to_all",
        bucket_cap_mb=1e-4,
        lr=0.1,
    )
    try:
        for step in range(STEPS):
            for number in range(case.rounds):
                diverges = (transport.rank, step, number) == (case.victim, case.step, case.rounds - 1)

                def before(place: int, diverges: bool = diverges) -> None:
                    if diverges and place == case.block:
                        diverging()
                        end(case, parts_of(optimizer).transport)

                batch = torch.ones(2, WIDTH) * (1 + transport.rank + step + number)
                model(batch, order_of(case, diverges), before).square().mean().backward()
            if case.clips:
                optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        with optimizer.gathered():
            data = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
        return Seen("", time.monotonic(), hashlib.sha256(data).hexdigest())
    except (CollectiveError, KeyError, torch.OutOfMemoryError) as error:
        if isinstance(error, torch.OutOfMemoryError) and transport.rank == case.victim:
            raise Lost from error  # the program ends
        return Seen(f"{type(error).__name__}: {error}", time.monotonic())


def on_threads(case: Case) -> tuple[float, list[Seen | None]]:
    loopback: StreamedLoopback[Any] = StreamedLoopback(case.ranks, limit=case.limit, timeout=case.patience)
    parted = list[float]()

    def program(transport: Transport) -> Seen | None:
        try:
            return train(case, transport, lambda: parted.append(time.monotonic()))
        except Lost:
            vars(loopback._world).setdefault("ended", set()).add(transport.rank)
            mine = transport.launches
            SENTINEL._posts[:] = [post for post in SENTINEL._posts if mine is None or post._launches() is not mine]
            return None

    found = loopback.run(program)
    return (parted or [time.monotonic()])[0], found


def serve(rank: int, pipe: Any, port: int, case: Case) -> None:
    logging.getLogger("collectives").setLevel(logging.CRITICAL)
    store, limit = dist.TCPStore("127.0.0.1", port, None, False), timedelta(seconds=case.patience)
    own = dist.PrefixStore("group", store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=case.ranks, timeout=limit)
    mail = Mail(dist.TCPStore("127.0.0.1", port, None, False))
    transport = Transport(StreamedGloo(dist.group.WORLD, case.patience, mail, case.limit))
    try:
        pipe.send(train(case, transport, lambda: pipe.send(time.monotonic())))
    except Lost:
        sys.exit(1)
    pipe.poll(PATIENCE)  # others must not learn from the end of this process


def on_processes(case: Case) -> tuple[float, list[Seen | None]]:
    group = Group(serve, case.ranks, case)
    parted, found = time.monotonic(), list[Seen | None]([None] * case.ranks)
    try:
        for rank in sorted(range(case.ranks), key=lambda rank: rank == case.victim):
            with suppress(EOFError, ConnectionResetError):
                while not isinstance(seen := group.hear(rank), Seen):
                    parted = seen
                    if case.what == "stops":
                        break
                found[rank] = seen if isinstance(seen, Seen) else None
    finally:
        if case.what == "stops":
            group.processes[case.victim].kill()
        codes = group.end()
    assert set(codes) <= {0, 1} or case.what == "stops", f"{case}: processes ended with {codes}"
    return parted, found


def ran(case: Case) -> tuple[float, list[Seen | None]]:
    """Return when the ranks parted, and what each saw; None of one that was lost."""
    return on_processes(case) if case.processes else on_threads(case)


def run(case: Case) -> float:
    """Return the seconds until the last rank raised. Each must in time, and name the victim."""
    parted, found = ran(case)
    limit, longest = (case.patience if case.what == "stops" else case.limit) + SOON, 0.0
    for rank, seen in enumerate(found):
        if rank != case.victim or case.what in ("order", "unit"):
            assert seen is not None, f"{case}: rank {rank} ended"
            assert f"rank {case.victim}" in seen.error, f"{case}: rank {rank}: {seen.error}"
            longest = max(longest, seen.at - parted)
            assert longest < limit, f"{case}: rank {rank} needed {longest:.1f} s: {seen.error}"
    return longest


def run_late(case: Case) -> None:
    """Run a case with a late rank, and without: no rank raises, and all have the same weights."""
    digests = set()
    for each in (case, replace(case, what="", processes=False)):
        for rank, seen in enumerate(ran(each)[1]):
            assert seen is not None, f"{each}: rank {rank} ended"
            assert not seen.error, f"{each}: rank {rank}: {seen.error}"
            digests.add(seen.digest)
    assert len(digests) == 1, f"{case}: {len(digests)} different weights"


def drawn(seed: int, limit: float = 0.5, *, late: bool = False) -> Case:
    """Return a random case. Units exist at stage 3 alone, where a rank may run others than its peers."""
    source = random.Random(seed)
    what = source.choice(LATE if late else DIVERGENCES)
    stage = 3 if what in ("order", "unit") else source.randrange(4)
    ranks = source.randint(2, 4)
    return Case(
        what,
        stage,
        ranks,
        source.randrange(ranks),
        source.randrange(1, STEPS),
        source.randrange(BLOCKS),
        source.randint(1, 2),
        source.random() < 0.5,
        source.random() < 0.5 or what == "holds",  # a thread would hold the interpreter of all
        limit,
    )


def main(divergences: int = 60, late: int = 6, limit: float = 0.5) -> None:
    logging.getLogger("collectives").setLevel(logging.CRITICAL)
    begin, longest, kinds = time.monotonic(), 0.0, Counter[str]()
    for seed in range(divergences):
        case = drawn(seed, limit)
        longest = max(longest, run(case))
        kinds[f"{case.what} ({'processes' if case.processes else 'threads'})"] += 1
        print(f"\r{seed + 1} of {divergences} divergences", end="", flush=True)
    print(f" in {time.monotonic() - begin:.0f} s; named on every rank after {longest:.1f} s at most; limit {limit} s")
    print(", ".join(f"{kind}: {count}" for kind, count in sorted(kinds.items())))
    for seed in range(late):
        run_late(drawn(seed, limit, late=True))
        print(f"\r{seed + 1} of {late} late ranks: nothing raised, same bits", end="", flush=True)
    print()


if __name__ == "__main__":
    main(*(kind(given) for kind, given in zip((int, int, float), sys.argv[1:], strict=False)))
