"""Seconds of compute and of collectives: of a unit's forward and backward, of an update, and on the links of a cluster.

    forward     matmul/(peak e_mm h/(h+h0))  +  attention/(peak e_at)  +  moved bytes/(bandwidth e_m)
    backward    2 x products, 2.5 x attention, 2 x moved bytes; and what is recomputed of the forward
    update      bytes of gradient, weights and states/bandwidth, as a fused kernel moves them; of the device's memory,
                or of the host's

The host issues kernels meanwhile (`HostCalls.launch`). Its seconds are returned apart, since a schedule knows which of
the two waits. Some of the `CONSTANTS` are fitted to published runs.

What a collective costs on the links of a cluster: seconds, and the bytes that are sent and that cross hosts.

    ring            base + (n-1) a + (n-1)/n B/bw      NCCL's reduce-scatter and all-gather: `native`, others' FSDP
    exchange        `pairwise`, `all_to_all`: a rank sends each owner its part, through the link of one GPU
    shared          ranks of one host of CPUs: no transfer, but a read of all contributions when they are awaited
    hierarchical    hosts of CPUs: the sums of `collectives.algorithms.plans` cross, the rest is shared
    fold            hosts of GPUs: an exchange inside each host, and the sum goes from host to host in chunks, then home
    chain           between replicas: the sum goes from replica to replica and comes back

n ranks, B bytes of the whole buffer, a seconds a step, bw the slowest link on the way: inside a host the link of a
rank, between hosts the network of a host, of which a group has the share of its ranks.

Source of the ring: "Demystifying NCCL" (Hu et al. 2025), and nccl-tests, PERFORMANCE.md, for the busbw convention.

Knows: work in operations and bytes, peaks, links, constants. Does not know: order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from collectives import algorithm_for
from collectives.algorithms.plans import chunk_of_fold, equal_hosts, folded

from ...core.layout import Dtypes
from ..hardware import Accelerator, Cluster
from ..model import UnitWork

CONSTANTS: Mapping[str, float] = MappingProxyType(
    {
        # shares of the peak. For Ampere and Hopper fitted; else 0.91 of the maximum that was measured (stas00/
        # ml-engineering, compute/accelerator/README.md: 95 of 125, 1745 of 2250 TFLOP/s), as those have of theirs
        # (0.847 of 0.869, 0.672 of 0.803); as Hopper; or an assumption: measure your own machine
        "matmul.ampere": 0.847,
        "matmul.hopper": 0.672,
        "matmul.volta": 0.69,
        "matmul.blackwell": 0.7,
        "matmul.ada": 0.67,  # no measured maximum is known here
        "matmul.cpu": 0.7,
        "attention.ampere": 0.313,
        "attention.hopper": 0.182,
        "attention.volta": 0.25,  # between Ampere and Hopper, as Ada
        "attention.blackwell": 0.182,
        "attention.ada": 0.25,
        "attention.cpu": 0.3,
        "hidden": 486.0,  # features at which products reach half of their share: fitted
        "elementwise": 0.822,  # share of the memory's bandwidth in element-wise operations: fitted
        "compiled": 0.237,  # share of element-wise bytes that is left by a compiler: fitted
        "overlap": 0.6,  # seconds of slowdown for each second beside a collective: fitted
        "fixed": 0.019,  # seconds of a step that no unit explains: fitted
        # share of a step for each doubling of hosts, an assumption: runs on quiet clusters cannot tell it from the
        # steps of a ring
        "jitter": 0.005,
        # seconds of the host in a backward for each of its forward: benchmarks/results/gpu-short-c.json, the plain
        # loop: backward 27.5 ms, forward 20.5
        "host_backward": 1.34,
    }
)
"""Every constant of the equations, by name; "matmul.ampere" is that of a family."""

NEWTON_SCHULZ = 5  # iterations: the default of torch.optim.Muon
ATTENTION_BACKWARD = 2.5  # for each product of a flash attention's forward: Dao, FlashAttention-2 (2023), section 4.1


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of one unit for one micro-batch.

    Attributes:
        forward: of compute.
        backward: of compute, without what is recomputed.
        recompute: of compute, in the backward.
        host: in which the host issues the forward.
        host_backward: in which it issues the backward and what is recomputed.
    """

    forward: float
    backward: float
    recompute: float = 0.0
    host: float = 0.0
    host_backward: float = 0.0

    def with_hooks(self, forward: float, backward: float) -> PassSeconds:
        """Return the same passes with more seconds of the host."""
        return replace(self, host=self.host + forward, host_backward=self.host_backward + backward)


class Compute:
    """The equations for the GPUs of a cluster, one dtype of products and one set of constants."""

    def __init__(self, cluster: Cluster, dtype: str, constants: Mapping[str, float] = CONSTANTS) -> None:
        """``dtype``: of the products, for instance "bfloat16"; ``constants``: by the names of `CONSTANTS`."""
        self.constants = constants
        self.cluster, gpu = cluster, cluster.gpu
        self.calls = cluster.calls
        self._peak = gpu.peak(dtype) * gpu.sustained
        self._matmul, self._attention = self._share(gpu, "matmul"), self._share(gpu, "attention")
        self._memory = gpu.memory_bandwidth * gpu.efficiency.get("memory", 1.0)
        self._host_memory = gpu.host_link if gpu.host_memory is None else gpu.host_memory
        self._elementwise = gpu.memory_bandwidth * gpu.efficiency.get("memory", self.constants["elementwise"])

    def _share(self, gpu: Accelerator, which: str) -> float:
        name = f"{which}.{gpu.family}"
        if which in gpu.efficiency:
            return gpu.efficiency[which]
        if name not in self.constants:
            families = sorted(key.partition(".")[2] for key in self.constants if key.startswith(f"{which}."))
            raise ValueError(
                f"GPU {gpu.name!r} is of the unknown family {gpu.family!r}: use one of {', '.join(families)}, or "
                f'write "efficiency" into the file of hardware'
            )
        return self.constants[name]

    def forward(self, work: UnitWork, hidden: int = 0) -> float:
        """Return the seconds of a forward. ``hidden``: features of a token; 0: products are large."""
        products, attended, moved = self._parts(work, hidden)
        return products + attended + moved

    def backward(self, work: UnitWork, hidden: int = 0) -> float:
        """Return the seconds of a backward in which nothing is recomputed. Arguments: those of `forward`."""
        products, attended, moved = self._parts(work, hidden)
        return 2 * products + ATTENTION_BACKWARD * attended + 2 * moved

    def passes(self, work: UnitWork, repeated: UnitWork | None = None, hidden: int = 0) -> PassSeconds:
        """Return the seconds of a unit. ``repeated``: what of its forward the backward does again; None: nothing."""
        recompute, again = 0.0, 0
        if repeated is not None:
            recompute, again = self.forward(repeated, hidden), repeated.kernels
        host = work.kernels * self.calls.launch
        host_backward = self.constants["host_backward"] * host + again * self.calls.launch
        return PassSeconds(self.forward(work, hidden), self.backward(work, hidden), recompute, host, host_backward)

    def update(self, elements: float, dtypes: Dtypes, state_tensors: float) -> float:
        """Return the seconds in which an owner updates ``elements``."""
        return elements * update_bytes(dtypes, state_tensors) / self._memory

    def update_on_host(self, elements: float, dtypes: Dtypes, state_tensors: float) -> float:
        """Return the seconds in which an owner's host updates ``elements`` in its memory. The parameter is not written
        there: it is rounded where it is gathered."""
        nbytes = update_bytes(dtypes, state_tensors) - dtypes.has_master * dtypes.itemsize("param_dtype")
        return elements * nbytes / self._host_memory

    def orthogonalization(self, multiplications: float) -> float:
        """Return the seconds of Muon's Newton-Schulz iterations, at the rate of the products of the training.

        ``multiplications``: `zero.core.layout.step_work`, m m n, of the matrices. An iteration of torch.optim.Muon
        takes two products of m m n and one of m m m, at most as many: 6 m m n operations.
        """
        return NEWTON_SCHULZ * 6 * multiplications / (self._peak * self._matmul)

    def _parts(self, work: UnitWork, hidden: int) -> tuple[float, float, float]:
        """Return the seconds of a forward's products, of its attention and of what it moves."""
        gpu, large = self.cluster.gpu, hidden / (hidden + self.constants["hidden"]) if hidden else 1.0
        products = (work.matmul_flops - work.fp32_flops) / (self._peak * self._matmul * large)
        if work.fp32_flops:
            products += work.fp32_flops / (gpu.peak("float32") * gpu.sustained * self._matmul * large)
        attended = work.attention_flops / (self._peak * self._attention)
        return products, attended, work.moved_bytes / self._elementwise


def update_bytes(dtypes: Dtypes, state_tensors: float) -> float:
    """Return the bytes that a fused update reads and writes for each element.

    It reads the gradient, and reads and writes weights and states: 28 for Adam in fp32. Where there are masters, it
    also writes the parameter.
    """
    master = dtypes.itemsize("master_dtype")
    parameter = dtypes.itemsize("param_dtype") if dtypes.has_master else 0
    return dtypes.itemsize("accumulate_dtype") + 2 * master * (1 + state_tensors) + parameter


@dataclass(frozen=True)
class RankGroup:
    """Ranks that take part in one collective, evenly spread over ``hosts`` (domains of fast links)."""

    ranks: int
    hosts: int

    @property
    def per_host(self) -> float:
        return self.ranks / self.hosts

    @classmethod
    def neighbours(cls, cluster: Cluster, ranks: int) -> RankGroup:
        """Return the group of ``ranks`` neighbouring ranks, such as those that share a copy."""
        return cls(ranks, -(-ranks // cluster.per_domain))

    @classmethod
    def replicas(cls, cluster: Cluster, factor: int) -> RankGroup:
        """Return the group of the ranks that own one slice, one in each replica of ``factor`` ranks."""
        replicas, in_domain = cluster.ranks // factor, max(cluster.per_domain // factor, 1)
        return cls(replicas, -(-replicas // in_domain))


@dataclass(frozen=True)
class WireCost:
    """What one collective costs.

    Attributes:
        seconds: from its start until the last rank has all bytes.
        period: seconds until the wire can begin the next one; shorter than ``seconds`` for a chain of replicas.
        fold: seconds of the compute stream of the rank that waits: it adds up, or copies.
        sent: payload bytes, over all ranks of the group.
        crossed: those that cross between hosts.
        host: seconds in which the host issues it, and what belongs to it.
        returning: those of ``seconds`` in which a sum that this rank has passed on goes through the other replicas.
    """

    seconds: float = 0.0
    period: float = 0.0
    fold: float = 0.0
    sent: float = 0.0
    crossed: float = 0.0
    host: float = 0.0
    returning: float = 0.0


NOTHING = WireCost()


class Wires:
    """The links of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        network, gpu = cluster.network, cluster.gpu
        self.cluster, self.network = cluster, network
        self.on_gpu = gpu.family != "cpu"
        self.link = network.link_efficiency * gpu.link
        domain_nic = cluster.nic * cluster.per_domain / cluster.per_host
        self.rail = network.nic_efficiency * domain_nic / cluster.per_domain  # what each rank may send to other domains
        self.memory = gpu.memory_bandwidth * gpu.efficiency.get("memory", 1.0)

    def ring(self, nbytes: float, group: RankGroup) -> WireCost:
        """Return the cost of a reduce-scatter or an all-gather by a ring."""
        n, hosts = group.ranks, group.hosts
        if n == 1:
            return NOTHING
        bandwidth, step = self.link, self.network.hop_inside
        if hosts > 1:
            bandwidth, step = min(self.link, self.rail * group.per_host), self.network.ring_step
        seconds = self.network.base + (n - 1) * step + (n - 1) / n * nbytes / bandwidth
        crossed = hosts * (n - 1) / n * nbytes if hosts > 1 else 0.0
        return WireCost(seconds, seconds, 0.0, (n - 1) * nbytes, crossed)

    def exchange(self, nbytes: float, group: RankGroup) -> WireCost:
        """Return the cost of a direct exchange: each rank sends each other one its part of ``nbytes``."""
        n = group.ranks
        inside, outside = (group.per_host - 1) / n * nbytes, (n - group.per_host) / n * nbytes
        seconds = self.network.base + (n - 1) * self.network.hop_inside
        transfer = inside / self.link
        if group.hosts > 1:
            seconds += self.network.ring_step
            transfer = max(transfer, outside / self.rail)
        seconds += transfer
        return WireCost(seconds, seconds, 0.0, (n - 1) * nbytes, outside * n if group.hosts > 1 else 0.0)

    def chain(self, inner: WireCost, sum_bytes: float, factor: int) -> WireCost:
        """Return the cost of a reduce-scatter in each replica and of the sum that goes through all and comes back.

        The first replica has the result last: exchange + (R-1)(hop + fold) + fold + (R-1) hop. With many buckets in
        flight, the wire begins the next one when it has sent both ways, which is the ``period``.

        Args:
            inner: the reduce-scatter inside a replica, whose fold adds its contributions to the sum.
            sum_bytes: bytes of the sums of a bucket, over all slices.
            factor: ranks of a replica.
        """
        replicas, fold = RankGroup.replicas(self.cluster, factor), inner.fold
        count, far = replicas.ranks, replicas.hosts - 1
        part = sum_bytes / factor
        hops = (count - 1 - far) * (self.network.hop_inside + part / self.link)
        hops += far * (self.network.ring_step + part / self.rail) if far else 0.0
        busy = 2 * part / (self.rail if far else self.link)
        return WireCost(
            inner.seconds + 2 * hops + count * fold,
            max(inner.period, busy, fold),
            fold,
            count * inner.sent + 2 * (count - 1) * sum_bytes,
            count * inner.crossed + 2 * far * sum_bytes,
            inner.host,
            2 * hops + (count - 1) * fold,
        )

    def fold(
        self, elements: float, travel: int, accumulate: int, group: RankGroup, *, started: bool = False
    ) -> WireCost:
        """Return the cost of a reduce-scatter whose sums go from host to host. See `reduce_scatter` for the arguments.

        The last host has the sum last: exchange, then hosts - 1 hops of the first chunk, then the other chunks, then
        their return. Each rank of a host sends 1 / (ranks of a host) of the sums through its own link to the network,
        which is busy for that; the first host also receives the sums so far, and an owner its total.
        """
        hosts, local = group.hosts, group.per_host
        inner = self.exchange(elements * travel, RankGroup(round(local), 1))
        sums = elements * accumulate / local
        chunk = min(sums, chunk_of_fold(round(elements / local)) * accumulate)
        adding = (chunk * travel / accumulate * local + 2 * chunk) / self.memory
        far = (hosts - 1) / hosts * sums / self.rail  # to the first host, and from the last one
        hops = (hosts - 1) * (self.network.ring_step + chunk / self.rail + adding) + (sums - chunk) / self.rail
        ways = 2 if started else 1
        seconds = inner.seconds + hops + ways * (self.network.ring_step + far)
        copied = (3 * elements * travel + 2 * sums) / self.memory  # into the order of the rails, and added up
        crossed = folded(hosts, started=started) * elements * accumulate
        return WireCost(
            seconds,
            max(inner.period, sums / self.rail + sums / hosts / self.rail),
            copied,
            hosts * inner.sent + crossed,
            crossed,
        )

    def algorithm(self, group: RankGroup) -> str:
        """Return the algorithm that "auto" takes for neighbouring ranks that share a copy."""
        replicas = self.cluster.ranks // group.ranks
        return algorithm_for(group.ranks, group.hosts, by_nccl=self.on_gpu, replicas=replicas)

    def reduce_scatter(
        self, elements: float, travel: int, accumulate: int, group: RankGroup, *, started: bool = False
    ) -> WireCost:
        """Return the cost of a reduce-scatter of this library.

        Args:
            elements: of the bucket.
            travel: bytes of an element of a contribution.
            accumulate: bytes of an element of the sum.
            group: the ranks that share a copy.
            started: the owner adds to a sum of earlier backwards.
        """
        n, nbytes, algorithm = group.ranks, elements * travel, self.algorithm(group)
        sums = (2 if started else 1) * elements / n * accumulate  # written, and read if there is one
        if n == 1:
            return WireCost(fold=(nbytes + sums) / self.memory)
        if algorithm == "native":
            fold = (3 * nbytes + nbytes / n + sums) / self.memory  # slices are padded: one write of zeros, one copy
            return replace(self.ring(nbytes, group), fold=fold)
        adding = (nbytes + sums) / self.memory
        if algorithm == "shared":
            return self._in_memory(nbytes, 0.0, adding, group)
        if algorithm == "hierarchical":
            hosts, per_host = group.hosts, round(group.per_host)
            crossed = elements * (equal_hosts(hosts, per_host, started, travel, accumulate) / (hosts * per_host))
            return self._in_memory(nbytes, crossed, adding, group)
        if algorithm == "fold":
            return self.fold(elements, travel, accumulate, group, started=started)
        return replace(self.exchange(nbytes, group), fold=adding)

    def all_gather(self, nbytes: float, group: RankGroup) -> WireCost:
        """Return the cost of an all-gather of this library, of ``nbytes`` in all slices."""
        n, algorithm = group.ranks, self.algorithm(group)
        if n == 1:
            return NOTHING
        if algorithm in ("native", "all_to_all", "fold"):
            return self.ring(nbytes, group)
        if algorithm in ("shared", "hierarchical"):
            return self._in_memory(nbytes, (group.hosts - 1) * nbytes, 2 * (n - 1) / n * nbytes / self.memory, group)
        return self.exchange(nbytes, group)

    # -- parts ----------------------------------------------------------------------------------------------------

    def latency(self) -> float:
        """Return the seconds of one short message from every rank to every other, by a tree of hosts."""
        group = RankGroup.neighbours(self.cluster, self.cluster.ranks)
        if group.ranks == 1:
            return 0.0
        between = 2 * math.ceil(math.log2(group.hosts)) * self.network.ring_step if group.hosts > 1 else 0.0
        return self.network.base + between

    def _in_memory(self, nbytes: float, crossed: float, fold: float, group: RankGroup) -> WireCost:
        """Return the cost where the ranks of each host share memory, and ``crossed`` bytes go between hosts."""
        crowd = max(group.ranks / self.cluster.gpu.per_host, 1.0)
        seconds = self.network.doorbell * group.ranks * crowd**2
        if crossed:
            steps = self.network.base + group.hosts * self.network.ring_step
            seconds = steps + crossed / group.hosts / (self.rail * group.per_host)
        return WireCost(seconds, seconds, fold, (group.ranks - 1) * nbytes, crossed)
