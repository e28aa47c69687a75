"""Choose a setting: those that differ, the best of them, the smallest cluster, and how it goes on with more ranks.

Knows: which settings differ, and what makes one better. Does not know: bytes and seconds of a setting (`plan`), tables,
pictures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..config import Offload
from ..core.buckets import DEFAULT_CAP_MB, MIB
from ..core.formulas import spread_of_owners
from ..core.stage import STAGES, Placement
from .hardware import Cluster
from .plan import PlannedSetting, Planner, usable_bytes
from .seconds.compute import Wires
from .setting import PlanSetting, Recompute

SAME = 0.015  # settings that were measured and published twice differ by this share of a step, in the median
LATENCY_SHARE = 0.1  # of a bucket's reduction that latency may take before larger buckets are better
MOST_RANKS = 10_000
_PARAMETERS_ON_HOST = Offload("cpu", parameters="cpu")


def settings(planner: Planner, cluster: Cluster) -> Iterator[PlanSetting]:
    """Yield the settings that differ."""
    on_gpus = cluster.gpu.family != "cpu"
    for number, stage in STAGES.items():
        caps = None, planner.unit_cap_mb("cuda" if on_gpus else "cpu")
        for whole in dict.fromkeys(planner.setting(cluster, number, cap) for cap in caps):
            if stage.states is Placement.WHOLE:
                yield whole
                continue
            for factor in sharding_factors(cluster):
                shared = replace(whole, sharding_factor=None if factor == cluster.ranks else factor)
                sharded = stage.parameters is Placement.SHARD
                for reshard in reshards(cluster, factor) if sharded else (True,):
                    kept = replace(shared, reshard_after_forward=reshard)
                    yield kept
                    if kept.quantized:
                        continue
                    yield replace(kept, offload=Offload("cpu" if on_gpus else "."))
                    if on_gpus and sharded and reshard is True:
                        yield replace(kept, offload=_PARAMETERS_ON_HOST)


def sharding_factors(cluster: Cluster) -> list[int]:
    """Return how many ranks may share a copy: divisors of a host's ranks, whole hosts, all."""
    ranks, host = cluster.ranks, cluster.per_host
    divisors = [number for number in range(1, ranks + 1) if ranks % number == 0]
    return [each for each in divisors if (each > 1 or ranks == 1) and (host % each == 0 or each % host == 0)]


def reshards(cluster: Cluster, factor: int) -> list[bool | int]:
    """Return the values of ``reshard_after_forward`` that differ."""
    if factor == 1:
        return [True]
    host = cluster.per_host
    near = [host] if factor > host else [each for each in range(2, factor) if factor % each == 0]
    return [True, *near, False]


def frontier(choices: Sequence[PlannedSetting]) -> list[PlannedSetting]:
    """Return the settings that fit and for which no other one is both smaller and faster, ordered by time."""
    best: list[PlannedSetting] = []
    fitting = [choice for choice in choices if choice.fits]
    for choice in sorted(fitting, key=lambda choice: (choice.seconds, choice.peak.total)):
        if not best or choice.peak.total < best[-1].peak.total:
            best.append(choice)
    return best


def recommended(choices: Sequence[PlannedSetting]) -> PlannedSetting | None:
    """Return the setting to take: of those that fit and are as fast as the fastest (`SAME`), the smallest whose states
    stay on the device, or else the smallest. None: none fits."""
    fitting = [choice for choice in choices if choice.fits]
    fastest = min((choice.seconds for choice in fitting), default=0.0)
    near = [choice for choice in fitting if choice.seconds <= fastest * (1 + SAME)]
    return min(near, key=lambda choice: (bool(choice.setting.offload), choice.peak.total), default=None)


def enough_bytes(cluster: Cluster, factor: int) -> float:
    """Return the bytes of a bucket from which on the latency of a ring takes at most `LATENCY_SHARE` of its time."""
    wires, steps = Wires(cluster), factor - 1
    if factor <= cluster.per_domain:
        return steps * cluster.network.hop_inside * wires.link * (1 / LATENCY_SHARE - 1)
    share = min(wires.link, wires.rail * min(factor, cluster.per_domain))
    return steps * cluster.network.ring_step * share * (1 / LATENCY_SHARE - 1)


def name_of(setting: PlanSetting) -> str:
    """Name a setting in a few words, without its defaults."""
    is_part = setting.row.states is Placement.SHARD and setting.sharding_factor is not None
    parts = [f"zero {setting.stage}" + (f" over {setting.factor} ranks" if is_part else "")]
    kept = setting.reshard_after_forward
    if kept is not True:
        parts.append("kept whole" if kept is False else f"kept over {kept}")
    if setting.prefetch_depth != 1:
        parts.append(f"{setting.prefetch_depth} ahead")
    if setting.offload:
        parts.append(f"{'states and parameters' if setting.offloads_parameters else 'states'} on {setting.states_on}")
    if setting.bucket_bytes != DEFAULT_CAP_MB * MIB:
        parts.append(f"{setting.bucket_bytes // MIB} MiB buckets")
    return ", ".join(parts)


def smallest_cluster(planner: Planner, cluster: Cluster) -> PlannedSetting | None:
    """Return what fits on the smallest cluster of the same hosts, all ranks sharing one copy.

    Up to one host it has 1, 2, 4 GPUs and so on, then whole hosts. None: no number up to `MOST_RANKS` is enough, or
    there is no network.
    """
    host = cluster.per_host
    powers = [1 << power for power in range(host.bit_length()) if 1 << power < host]
    for ranks in [*powers, host]:
        found = _fitting(planner, replace(cluster, per_host=ranks, hosts=1))
        if found:
            return found
    low, high, last = 1, max(MOST_RANKS // host, 1), None
    if cluster.nic:
        last = _fitting(planner, replace(cluster, hosts=high))
    while last is not None and high - low > 1:
        middle = (low + high) // 2
        found = _fitting(planner, replace(cluster, hosts=middle))
        low, high, last = (low, middle, found) if found else (middle, high, last)
    return last


def _fitting(planner: Planner, cluster: Cluster) -> PlannedSetting | None:
    """Return the first setting that fits: a stage, or stage 3 with its states on the host or on a disk, or with all of
    its shards on the host."""
    tried = [planner.setting(cluster, stage) for stage in STAGES]
    places = [Offload(".")] if cluster.gpu.family == "cpu" else [Offload("cpu"), _PARAMETERS_ON_HOST]
    tried += [replace(tried[-1], offload=place) for place in places if not tried[-1].quantized]
    least = planner.held(tried[-1], cluster).peak
    if least.states + least.activations > usable_bytes(cluster):  # no other has fewer
        return None
    held = (planner.held(setting, cluster) for setting in tried)
    return next((each for each in held if each.fits), None)


@dataclass(frozen=True)
class ScalePoint:
    """One number of ranks of a curve, each rank with the same batch: tokens a second of one rank, and those of the
    slowest and the fastest fabric, ``low`` and ``high``."""

    ranks: int
    tokens_per_second_of_rank: float
    low: float
    high: float
    fits: bool


def scale_curves(
    planner: Planner, cluster: Cluster, chosen: PlanSetting, fabrics: Mapping[str, float]
) -> dict[str, list[ScalePoint]]:
    """Return the curves of the chosen stage, by name, from one host to `MOST_RANKS` ranks: one copy on all ranks, on
    each host and on eight hosts, with buckets of a unit, and one copy on all ranks with buckets of 25 MiB. None has one
    point.

    Args:
        planner: of the training.
        cluster: its hosts; alone, if it has no network.
        chosen: whose stage and ``reshard_after_forward`` are taken.
        fabrics: seconds of a ring's step, by name.
    """
    unit = planner.unit_cap_mb("cpu" if cluster.gpu.family == "cpu" else "cuda")
    micro_batches, host = planner.training.micro_batches(cluster.ranks), cluster.per_host
    whole = "sharded over all ranks" if chosen.row.states is Placement.SHARD else "a copy on each rank"
    wanted = [(whole, 0, unit)]
    if chosen.row.states is Placement.SHARD:
        wanted += [(f"sharded over {factor} ranks", factor, unit) for factor in (host, 8 * host) if factor > 1]
    if unit > DEFAULT_CAP_MB:
        wanted.append((f"{whole}, {DEFAULT_CAP_MB} MiB buckets", 0, DEFAULT_CAP_MB))
    curves: dict[str, list[ScalePoint]] = {}
    for name, factor, cap in wanted:
        points = []
        sharing = max(factor // host, 1)  # hosts that share a copy
        for hosts in sorted({count - count % sharing or 1 for count in host_counts(cluster)}):
            more = replace(cluster, hosts=hosts)
            if factor and more.ranks <= factor:
                continue
            setting = replace(planner.setting(more, chosen.stage, cap), sharding_factor=factor or None)
            setting = replace(setting, offload=chosen.offload)
            if chosen.row.parameters is Placement.SHARD and isinstance(chosen.reshard_after_forward, bool):
                setting = replace(setting, reshard_after_forward=chosen.reshard_after_forward)
            steps = planner.over_fabrics(setting, more, fabrics, micro_batches=micro_batches)
            rates = [step.tokens_per_second / more.ranks for step in steps]
            points.append(ScalePoint(more.ranks, rates[0], min(rates), max(rates), planner.held(setting, more).fits))
        if len(points) > 1:
            curves[name] = points
    return curves


def host_counts(cluster: Cluster) -> list[int]:
    """Return 1, 4, 16 hosts and so on up to `MOST_RANKS` ranks, and those asked for; one host without a network."""
    most = max(MOST_RANKS // cluster.per_host, 1) if cluster.nic else 1
    asked = {cluster.hosts} if cluster.hosts <= most else set()
    return sorted({1 << power for power in range(0, most.bit_length(), 2) if 2 << power <= most} | {most} | asked)


@dataclass(frozen=True)
class Findings:
    """What a plan has found.

    Attributes:
        planner, cluster: what it is made for.
        choices: every setting.
        best: the recommended one; None if nothing fits.
        shown: those that no other one beats, and the recommended one.
        bands: least and most seconds over all fabrics, of the settings that no other one beats.
        other_caps: sizes of buckets in MiB, and the share of a step that each costs more than the recommended one.
        smallest: what fits on the smallest cluster, by how blocks are recomputed.
        curves: of more hosts.
        spread: how parameters that have one owner each are spread over the ranks; empty if there are none.
    """

    planner: Planner
    cluster: Cluster
    choices: Sequence[PlannedSetting]
    best: PlannedSetting | None
    shown: Sequence[PlannedSetting]
    bands: Mapping[PlanSetting, tuple[float, float]]
    other_caps: Sequence[tuple[int, float]]
    smallest: Mapping[str, PlannedSetting]
    curves: Mapping[str, Sequence[ScalePoint]]
    spread: str


def findings_of(planner: Planner, cluster: Cluster, fabrics: Mapping[str, float], *, always: bool = False) -> Findings:
    """Plan every setting, and answer all questions that follow.

    ``fabrics``: seconds of a ring's step, by name. ``always``: simulate also what does not fit.
    """
    choices = []
    for setting in settings(planner, cluster):
        held = planner.held(setting, cluster)
        choices.append(replace(held, step=planner.step(setting, cluster)) if always or held.fits else held)
    best, shown = recommended(choices), frontier(choices)
    bands = {}
    for choice in shown:
        seconds = [step.seconds for step in planner.over_fabrics(choice.setting, cluster, fabrics)]
        bands[choice.setting] = min(seconds), max(seconds)
    if best is not None and best not in shown:
        shown.append(best)
    return Findings(
        planner,
        cluster,
        choices,
        best,
        shown,
        bands,
        [] if best is None else _other_caps(best, choices),
        _smallest(planner, cluster),
        {} if best is None else scale_curves(planner, cluster, best.setting, fabrics),
        "" if best is None else spread_of_owners(planner.memory.laid_out(best.setting).layout, best.setting.row),
    )


def _other_caps(best: PlannedSetting, choices: Sequence[PlannedSetting]) -> list[tuple[int, float]]:
    sizes = best.setting.bucket_sizes
    others = [each for each in choices if each.setting.bucket_sizes != sizes and each.step]
    return [
        (each.setting.bucket_bytes // MIB, each.seconds / best.seconds - 1)
        for each in others
        if replace(each.setting, bucket_cap_mb=sizes.most / MIB, first_bucket_bytes=sizes.first) == best.setting
    ]


def _smallest(planner: Planner, cluster: Cluster) -> dict[str, PlannedSetting]:
    found: dict[str, PlannedSetting] = {}
    again: tuple[Recompute, ...] = ("full",) if planner.counts_activations else ()
    for recompute in (planner.training.recompute, *again):
        smallest = smallest_cluster(planner.recomputing(recompute), cluster)
        if smallest is not None and smallest.cluster not in [each.cluster for each in found.values()]:
            found[recompute] = smallest
    return found
