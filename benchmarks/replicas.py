"""`python -m benchmarks.replicas`: how long a round of sums takes between replicas, beside the plan's form for it.

The replicas are threads that really exchange the sums, on clocks of their own instead of the machine's:

    a rank's clock       is moved on by what it waits for alone: adding up takes no time
    a message arrives    when the sender's link has sent it and what it sent before, and a hop later

So the result does not depend on the machine, and is the same each time.

Knows: the clocks, and the queue of a backward. Does not know: gradients, stages.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor

try:
    import typer
except ModuleNotFoundError as absent:
    sys.exit(f"error: this benchmark needs {absent.name}: python -m pip install -e '.[cli]'")

from collectives import BucketQueue, Kind, Loopback, Pairwise, Replicated, Tag, Transport, Work
from collectives.backend import Pending
from collectives.backends.threads import ThreadBackend, _World
from zero.core.stage import sums_under_way
from zero.planning.hardware import presets
from zero.planning.seconds.wires import RankGroup, WireCost, Wires

from . import tables
from .report import Report
from .tables import Table

NUMEL = 1024  # of a slice: what a thread really moves
SHORT = 1 << 10  # bytes of a message that no link notices


@dataclass(frozen=True)
class Link:
    """Seconds of a hop, and those in which a rank sends a slice."""

    hop: float
    slice: float

    @property
    def bandwidth(self) -> float:
        return 4 * NUMEL / self.slice if self.slice else float("inf")


class Clocks:
    """The clock and the link of each rank, and when each message arrives."""

    def __init__(self, ranks: int, link: Link) -> None:
        self.link, self.now, self._free = link, [0.0] * ranks, [0.0] * ranks
        self.arrivals: defaultdict[tuple[int, int, int], list[float]] = defaultdict(list)

    def sent(self, rank: int, to: int, slot: int, nbytes: int) -> None:
        ready = self.now[rank]
        if nbytes > SHORT:
            ready = self._free[rank] = max(ready, self._free[rank]) + nbytes / self.link.bandwidth
        self.arrivals[rank, to, slot].append(ready + self.link.hop)


class ClockedBackend(ThreadBackend):
    """Messages between threads, whose receiver's clock is that of the arrival."""

    def __init__(self, world: _World, rank: int, world_size: int, clocks: Clocks) -> None:
        super().__init__(world, rank, world_size, timeout=600.0)
        self.clocks = clocks
        self._received: defaultdict[tuple[int, int], int] = defaultdict(int)

    def send(self, tensor: Tensor, to: int, slot: int) -> Pending:
        self.clocks.sent(self.rank, to, slot, tensor.numel())
        return super().send(tensor, to, slot)

    def recv(self, tensor: Tensor, source: int, slot: int) -> Pending:
        number = self._received[source, slot]
        self._received[source, slot] += 1
        return _Arrival(self, super().recv(tensor, source, slot), (source, self.rank, slot), number)


class _Arrival:
    def __init__(self, backend: ClockedBackend, pending: Pending, key: tuple[int, int, int], number: int) -> None:
        self._backend, self._pending, self._key, self._number = backend, pending, key, number

    def wait(self, timeout: float) -> None:
        self._pending.wait(timeout)
        clocks, rank = self._backend.clocks, self._backend.rank
        clocks.now[rank] = max(clocks.now[rank], clocks.arrivals[self._key][self._number])


def round_seconds(replicas: int, buckets: int, link: Link, behind: int) -> float:
    """Return the seconds until the last rank has the totals of all buckets. ``behind``: of `BucketQueue`."""
    group, clocks = Loopback[None](replicas), Clocks(replicas, link)
    world = _World(None)
    group._world = world
    group.transports = [Transport(ClockedBackend(world, rank, replicas, clocks)) for rank in range(replicas)]

    def program(transport: Transport) -> None:
        collective = Replicated(transport, Pairwise(transport.split([transport.rank])))
        sources = [torch.full((NUMEL,), float(transport.rank + bucket)) for bucket in range(buckets)]
        sums = [torch.empty(NUMEL) for _ in range(buckets)]

        def launch(bucket: int) -> Work:
            tag = Tag(Kind.REDUCE_SCATTER, f"bucket {bucket}", 1, bucket)
            return collective.reduce_scatter(sources[bucket], [0, NUMEL], sums[bucket], start=None, tag=tag)

        queue = BucketQueue(launch, 1, behind)
        queue.begin(range(buckets))
        queue.finish()
        for bucket, total in enumerate(sums):
            expected = sum(rank + bucket for rank in range(replicas))
            assert total.eq(float(expected)).all(), f"rank {transport.rank}, bucket {bucket}: {total[0]}"

    group.run(program)
    return max(clocks.now)


def planned(replicas: int, link: Link) -> WireCost:
    """Return the plan's cost of one bucket: its latency and its period."""
    cluster = presets().cluster("a100-80:8")
    wires = Wires(replace(cluster, network=replace(cluster.network, hop_inside=link.hop, link_efficiency=1.0)))
    nbytes = link.slice * wires.link
    return wires.chain(WireCost(), nbytes, 0.0, 1, RankGroup(replicas, 1))


def main(
    replicas: Annotated[int, typer.Option(help="Ranks that each hold a whole copy.")] = 128,
    buckets: Annotated[int, typer.Option(help="Buckets of a round.")] = 32,
    hop_us: Annotated[float, typer.Option(help="Microseconds of a hop.")] = 15.0,
    slice_us: Annotated[float, typer.Option(help="Microseconds in which a rank sends a slice.")] = 250.0,
    quick: Annotated[bool, typer.Option("--quick", help="8 replicas and 6 buckets.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for replicas.json.")] = Path("zero-bench"),
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
) -> None:
    """Milliseconds of a round of sums between replicas, on simulated clocks."""
    console = tables.console(stderr=markdown)
    replicas, buckets = (8, 6) if quick else (replicas, buckets)
    parts, rows = [], []
    for link in (Link(hop_us * 1e-6, 0.0), Link(hop_us * 1e-6, slice_us * 1e-6)):
        cost = planned(replicas, link)
        ways = (
            ("one bucket at a time", 0, buckets * cost.seconds),
            ("one on every hop", sums_under_way(replicas), cost.seconds + (buckets - 1) * cost.period),
        )
        for way, behind, form in ways:
            with console.status(way):
                seconds = round_seconds(replicas, buckets, link, behind)
            parts.append({"way": way, "hop": link.hop, "slice": link.slice, "seconds": seconds, "planned": form})
            sizes = [f"{link.slice * 1e6:g}", way]
            rows.append([*sizes, f"{seconds * 1e3:.2f}", f"{form * 1e3:.2f}", f"{seconds / form:.2f}"])
    report = Report.of_this_machine("benchmarks.replicas", parts)
    report.write(out / "replicas.json")
    caption = f"milliseconds of a round: {replicas} replicas, {buckets} buckets, {hop_us:g} us a hop; simulated clocks"
    header = ("us to send a slice", "in flight", "round", "plan", "ratio")
    tables.show(report.line(), [Table(caption, header, rows)], markdown, console)


if __name__ == "__main__":
    typer.run(main)
