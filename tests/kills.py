"""Groups of real processes in which a rank dies, stops, fails or exits in the middle of collectives.

    python -m tests.kills [KILLS, by default 200] [RANKS, by default 2 to 4 at random]

kills a random rank in the middle of random collectives of every algorithm, again and again. Each time it checks that
every other rank raises, in time, one error that names the dead rank and the collective, and that nothing is left
behind.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import collectives
from collectives import ALGORITHMS, Algorithm, Collective, CollectiveError, Hierarchical, Kind, Tag, Transport
from collectives.backends.gloo import connect
from collectives.links.control_plane import MESH_RANKS
from collectives.topology import by_name

from .support.carried import built
from .support.processes import PATIENCE, Group
from .support.sockets import routed

SOON = 5.0  # seconds in which the other ranks must raise
LABEL = "the sum that never ends"
MADE: dict[str, Algorithm] = {
    **{name: built(name) for name, row in ALGORITHMS.items() if name != "native"},
    "shared": lambda transport: by_name(transport, "shared").collective,
    "hierarchical": lambda t: Hierarchical(routed(t, halves(t.world_size)), halves(t.world_size)),
}


class End(Enum):
    KILLED, STOPPED, RAISED, LEFT = "killed", "stopped", "raised", "left"


@dataclass(frozen=True)
class Case:
    """A failure of one rank, the victim."""

    algorithm: str
    collective: str
    world_size: int
    victim: int
    end: End = End.KILLED
    numel: int = 5000
    moment: int | None = 3  # the number of the collective in which the victim ends itself; None: it is killed
    delay: float = 0.0  # seconds before that
    limit: float = 60.0  # of the group
    stays: bool = False  # the other ranks do not exit after they have reported their errors

    @property
    def named(self) -> str:
        """The pattern of the other ranks' errors, which name the victim.

        Torch's own collectives do not say for which rank they waited; and if ranks wait in a chain for one that
        stopped, gloo may close connections before the failure is passed on.
        """
        if self.algorithm == "all_to_all" or (self.end is End.STOPPED and self.algorithm == "hierarchical"):
            return rf"no answer from rank \d+|rank \d+ failed.*in {LABEL}|in {LABEL}.*rank \d+ failed"
        return f"^rank \\d+, in {LABEL}: (no answer from rank|rank) {self.victim} (after|failed)"


def halves(world_size: int) -> list[list[int]]:
    """Split the ranks evenly between two hosts, alternating."""
    return [list(range(0, world_size, 2)), list(range(1, world_size, 2))][: min(2, world_size)]


def by_tree(transport: Transport) -> Transport:
    """Let short messages go by a star in each of `halves` and between the two."""
    transport.route(halves(transport.world_size))
    return transport


def launch(collective: Collective, what: str, number: int, numel: int) -> Callable[[], Any]:
    """Launch a collective; return the function that completes it."""
    t, kind = collective.transport, Kind[what.upper()]
    tag = Tag(kind, LABEL, 0 if kind is Kind.MEET else number, number)
    bounds = [numel * rank // t.world_size for rank in range(t.world_size + 1)]
    if kind is Kind.REDUCE_SCATTER:
        source = t.scratch(numel, torch.float32, torch.device("cpu")).fill_(1.0)
        out = torch.empty(bounds[t.rank + 1] - bounds[t.rank])
        return collective.reduce_scatter(source, bounds, out, start=None, tag=tag).wait
    if kind is Kind.ALL_GATHER:
        return collective.all_gather(torch.ones(numel), bounds, tag=tag).wait
    if kind is Kind.BROADCAST:
        return lambda: collectives.ring_broadcast(t, [torch.ones(numel)], tag)
    if kind is Kind.EXCHANGE:
        return lambda: t.exchange(bytes(numel), tag)
    return lambda: t.meet(tag, lambda: None, lambda: bytes(numel))


def end_self(end: End) -> None:
    if end in (End.KILLED, End.STOPPED):
        os.kill(os.getpid(), signal.SIGKILL if end is End.KILLED else signal.SIGSTOP)
    if end is End.RAISED:
        raise ZeroDivisionError("in the user's model")
    if end is End.LEFT:
        raise SystemExit


def named_files() -> list[str]:
    """Return the named files that this process holds open or mapped, and could leave behind."""
    places = [*Path("/proc/self/fd").iterdir(), *Path("/proc/self/map_files").iterdir()]
    found = []
    for place in places:
        with suppress(OSError):
            found.append(os.readlink(place))
    return [file for file in found if re.match("/(dev/shm|tmp|run)/", file) and not file.endswith(".so")]


def rank_of(rank: int, pipe: Any, port: int, case: Case) -> None:
    before = named_files()
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False)
    store.set(f"has imported all {rank}", "")
    store.wait([f"has imported all {other}" for other in range(case.world_size)])
    limit = timedelta(seconds=case.limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.world_size, timeout=limit)
    collective = MADE[case.algorithm](connect())
    if case.world_size > MESH_RANKS:
        by_tree(collective.transport)
    pipe.send(sorted(set(named_files()) - set(before)))
    pipe.recv()
    number, error = 0, ""
    while not error:
        number += 1
        try:
            wait = launch(collective, case.collective, number, case.numel)
            if number == case.moment and rank == case.victim:
                pipe.send(time.monotonic())
                end_self(case.end)
            wait()
        except CollectiveError as raised:
            error = str(raised)
    pipe.send((time.monotonic(), error))
    try:
        launch(collective, case.collective, number, case.numel)()
    except CollectiveError as again:
        pipe.send(str(again))
    if case.stays:
        pipe.poll(PATIENCE)  # the other ranks must learn of the failure without the end of this process


def run(case: Case) -> None:
    group = Group(rank_of, case.world_size, case)
    victim = group.processes[case.victim]
    try:
        named = [group.hear(rank) for rank in range(case.world_size)]
        assert named == [[]] * case.world_size, f"{case}: files that may be left behind: {named}"
        for pipe in group.pipes:
            pipe.send("go")
        if case.moment is None:
            time.sleep(case.delay)
            begin = time.monotonic()
            os.kill(victim.pid, signal.SIGKILL)
        else:
            begin = group.hear(case.victim)
        unseen = case.end is End.STOPPED or case.algorithm == "all_to_all"
        allowed = SOON + (case.limit if unseen else 0.0)
        for rank in set(range(case.world_size)) - {case.victim}:
            at, error = group.hear(rank, PATIENCE + allowed)
            assert at - begin < allowed, f"{case}: rank {rank} needed {at - begin:.1f} s: {error}"
            assert re.search(case.named, error), f"{case}: on rank {rank}: {error}"
            again = group.hear(rank, SOON)
            assert "this communicator is closed since an earlier failure" in again, f"{case}: {again}"
        if case.end is End.STOPPED:
            os.kill(victim.pid, signal.SIGCONT)
            _, error = group.hear(case.victim, allowed)
            assert LABEL in error, f"{case}: on rank {case.victim}, which went on: {error}"
            group.hear(case.victim, SOON)
    finally:
        codes = group.end()
    assert None not in codes, f"{case}: ranks do not end: {codes}"


def drawn(seed: int, ranks: int | None = None) -> Case:
    source = random.Random(seed)
    world_size = source.randint(2, 4) if ranks is None else ranks
    algorithm = source.choice(sorted(MADE))
    return Case(
        algorithm,
        source.choice(["reduce_scatter", "all_gather", "broadcast", "exchange", "meet"]),
        world_size,
        source.randrange(world_size),
        numel=source.choice([0, 7, 5000, 1 << 20]),
        moment=None,
        delay=source.random() * 0.1,
        limit=10.0 if algorithm == "all_to_all" else 60.0,
        stays=source.random() < 0.5,
    )


def main(count: int = 200, ranks: int | None = None) -> None:
    if ranks is not None and ranks < 2:
        sys.exit(f"error: {ranks} ranks: there must be another one, which notices that a rank was killed")
    begin, names = time.monotonic(), {path.name for path in Path("/dev/shm").iterdir()}
    for number in range(count):
        run(drawn(number, ranks))
        print(f"\r{number + 1} of {count} kills", end="", flush=True)
    sockets = Path("/proc/net/unix").read_text().count("@zero-")
    left = {path.name for path in Path("/dev/shm").iterdir()} - names
    print(f" in {time.monotonic() - begin:.0f} s; every other rank said so in time")
    print(f"left: in /dev/shm {sorted(left)}, sockets {sockets}, children {multiprocessing.active_children()}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
