"""`zero plan`: what a training costs on a cluster, before it is rented.

Knows: the order of the work, the lines that are printed, the exit codes. Does not know: equations (`zero.planning`),
how the files are written (`written`) and drawn (`pictures`).
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...core.buckets import MIB
from ...planning.choose import Findings, enough_bytes, findings_of, frontier, name_of, settings, smallest_cluster
from ...planning.hardware import Cluster
from ...planning.plan import PlannedSetting, Planner, Training, usable_bytes
from ..console import INSTALL_HINT, Console
from ..plots import can_draw
from ..runner import check_output, checking_input, fail, reports_errors
from .inputs import Asked, asked_of, training_of
from .pictures import draw_choices, draw_scale
from .settings import PlanConfig
from .written import cap_argument, start_of, write

NOTHING_FITS = 1
FILES = ("plan.json", "plan.png", "plan-scale.png", "trace.json")


@reports_errors
def run(config: PlanConfig) -> int:
    """Plan, print and write. The exit code is 1 if nothing fits, and 2 after wrong input."""
    with checking_input(ValueError):
        return _plan(config)


def _plan(config: PlanConfig) -> int:
    """Plan one training."""
    imports = _used()
    asked = asked_of(config)
    check_output(config.out, *FILES)
    console = Console()
    if asked.hardware.measured:
        console.line(f"hardware as measured: {asked.hardware.measured}")
    planner = Planner(asked.training)
    choices = [planner.choice(each, asked.cluster, always=config.all) for each in settings(planner, asked.cluster)]
    found = findings_of(planner, asked.cluster, choices, asked.hardware.fabrics)
    _print(config, found, console)
    code = 0
    if found.best is None:
        gb = _gb(usable_bytes(asked.cluster))
        fail(f"no setting fits into {gb} GB per rank: {_smallest_change(config, asked, planner)}")
        code = NOTHING_FITS
    files = write(config, found, planner)
    if can_draw():
        files += [draw_choices(config.out, found)] if found.best else []
        files += [draw_scale(config.out, found)] if any(len(curve.points) > 1 for curve in found.curves) else []
    else:
        console.line(f"no pictures: {INSTALL_HINT}")
    seconds, mebibytes = _used()
    console.line(f"wrote {', '.join(files)} in {config.out}")
    console.line(
        f"{seconds - imports[0]:.1f} s of CPU time and {mebibytes - imports[1]:.0f} MiB, plus "
        f"{imports[0]:.1f} s and {imports[1]:.0f} MiB for imports, torch included"
    )
    return code


def _used() -> tuple[float, float]:
    """Return the processor's seconds and the peak of resident memory, in MiB, of this process so far."""
    return time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _print(config: PlanConfig, found: Findings, console: Console) -> None:
    training, cluster = found.training, found.cluster
    micro_batches = training.micro_batches(cluster.ranks)
    console.line(
        f"{training.model.name}: {_short(training.model.numel)} parameters in {len(training.model.units)} units, "
        f"{_cluster(cluster)}, {config.precision}, {config.optimizer}, {micro_batches} x {training.micro} x "
        f"{training.sequence:,} tokens per rank and step, recompute {training.recompute}"
    )
    if not training.counts_activations:
        console.line("activations are not counted, and compute is 2 operations for each parameter and token")
    shown = found.choices if config.all else frontier(found.choices)
    if found.best and found.best not in shown:
        shown = [*shown, found.best]
    header = ["setting", "GB", "states", "activations", "gathered", "buckets", "s per step", "MFU", "GB a host sends"]
    rows = [_row(choice, found) for choice in sorted(shown, key=lambda choice: (choice.seconds, choice.peak.total))]
    if rows:
        console.table(f"a rank can use {_gb(usable_bytes(cluster))} GB; * recommended, - does not fit", header, rows)
        for line in _words(shown):
            console.line(line)
    if found.best:
        for line in _recommendation(config, found, found.best):
            console.line(line)
    for recompute, smallest in found.smallest.items():
        console.line(
            f"smallest cluster that fits, recompute {recompute}: {_cluster(smallest.cluster)}, "
            f"{name_of(smallest.setting)}, {_gb(smallest.peak.total)} of {_gb(smallest.usable)} GB{_beside(smallest)}"
        )
    for curve in found.curves:
        if len(curve.points) == 1:
            continue
        ends = (curve.points[0], curve.points[-1])
        rates = ", ".join(
            f"{_rate(p.tokens_per_second_of_rank)} at {p.ranks:,} ({_rate(p.low)}-{_rate(p.high)})"
            + ("" if p.fits else ", which does not fit")
            for p in ends
        )
        console.line(f"tokens/s per rank, {curve.name}: {rates}")


def _row(choice: PlannedSetting, found: Findings) -> list[str]:
    peak, step = choice.peak, choice.step
    sizes = [_gb(size) for size in (peak.total, peak.states, peak.activations, peak.gathered, peak.buckets)]
    mark = "* " if choice is found.best else "" if choice.fits else "- "
    name = mark + name_of(choice.setting)
    if step is None:
        return [name, *sizes, "", "", ""]
    low, high = found.bands.get(choice.setting, (step.seconds, step.seconds))
    band = f"{step.seconds:.3g}" if high - low < 0.005 * low else f"{step.seconds:.3g} ({low:.3g}-{high:.3g})"
    return [name, *sizes, band, f"{step.utilization:.1%}", _gb(step.left_host)]


def _words(shown: Sequence[PlannedSetting]) -> Iterator[str]:
    """Yield what the words in the names of settings mean."""
    names = [name_of(choice.setting) for choice in shown]
    if any(" ranks" in name for name in names):
        yield "over N ranks: sharding_factor=N, each N ranks share one copy; the others: all ranks do"
    if any("kept" in name for name in names):
        yield (
            "kept whole: reshard_after_forward=False, parameters stay gathered between forward and backward; kept over "
            "N: reshard_after_forward=N, N ranks keep them"
        )


def _recommendation(config: PlanConfig, found: Findings, best: PlannedSetting) -> Sequence[str]:
    assert best.step is not None
    training, cluster, step = found.training, found.cluster, best.step
    spare = f"fits with {_gb(best.usable - best.peak.total)} GB to spare"
    reasons = [spare + _beside(best)]
    others = [each for each in found.choices if each.fits and _kind(each) != _kind(best)]
    if others:
        other = min(others, key=lambda choice: choice.seconds)
        reasons.append(
            f"the fastest of another kind, {name_of(other.setting)}, is {_than(other.seconds / step.seconds)} in time "
            f"and {_than(other.peak.total / best.peak.total)} in memory"
        )
    waits = sorted(step.parts.items(), key=lambda part: -part[1])
    of_time = ", ".join(f"{s / step.seconds:.0%} {name}" for name, s in waits if s > 0.005 * step.seconds)
    lines = [f"recommended: {name_of(best.setting)}: {'; '.join(reasons)}", f"of its time: {of_time}"]
    lines.append(
        f"{step.tokens_per_second:,.0f} tokens/s, {step.tokens_per_second / cluster.ranks:,.0f} per rank; ranks send "
        f"{_gb(step.sent)} GB per step"
    )
    if config.tokens:
        lines.append(f"{config.tokens:.3g} tokens: {config.tokens / step.tokens_per_second / 86400:.1f} days")
    if config.price:
        dollars = config.price * cluster.ranks / 3600 * 1e9 / step.tokens_per_second
        lines.append(f"${dollars:,.2f} for a billion tokens")
    lines += [line for line in [found.spread] if line]
    lines.append(_buckets(found, best))
    lines.append(f"start: {start_of(config, best.setting, cluster, training.micro_batches(cluster.ranks), training)}")
    return lines


def _than(ratio: float) -> str:
    return f"{abs(ratio - 1):.1%} {'higher' if ratio > 1 else 'lower'}"


def _beside(choice: PlannedSetting) -> str:
    """Return what a rank needs beside its own memory."""
    place = {"": "", "host": "of the host's memory", "disk": "of a disk"}[choice.setting.states_on]
    return f", with {_gb(choice.offloaded)} GB {place} for each rank" if place else ""


def _kind(choice: PlannedSetting) -> tuple[int, int, object]:
    """Return what tells settings apart beside buckets and where states are."""
    return choice.setting.stage, choice.setting.factor, choice.setting.reshard_after_forward


def _buckets(found: Findings, best: PlannedSetting) -> str:
    cap, cluster = best.setting.bucket_bytes // MIB, found.cluster
    line = f"bucket_cap_mb: {cap}"
    named = cap_argument(best.setting, found.training)
    line += " (the default)" if not named else ' ("auto")' if named == "auto" else ""
    for other, change in found.other_caps:
        line += f"; {other} would cost {change:+.1%}"
    if best.setting.factor > 1:
        enough = enough_bytes(cluster, best.setting.factor) / MIB
        line += f" (latency is at most a tenth of a ring's time from {enough:,.0f} MiB on)"
    return line


def _gb(nbytes: float) -> str:
    """Return GB (10**9 bytes) with one decimal, or three digits of less than one."""
    return f"{nbytes / 1e9:.1f}" if nbytes >= 1e9 or nbytes < 1e3 else f"{nbytes / 1e9:.3g}"


def _rate(tokens: float) -> str:
    return f"{tokens:,.0f}" if tokens >= 10 else f"{tokens:.2g}"


def _short(count: int) -> str:
    """Return a number of parameters, as 8.03 B or 124.44 M."""
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"


def _cluster(cluster: Cluster) -> str:
    network = f", {cluster.nic * 8 / 1e9:,.0f} Gb/s a host" if cluster.hosts > 1 else ""
    hosts = f"{cluster.hosts} hosts" if cluster.hosts > 1 else "1 host"
    return f"{cluster.ranks} {cluster.gpu.name} ({hosts}{network})"


def _smallest_change(config: PlanConfig, asked: Asked, planner: Planner) -> str:
    """Return the first change that makes a setting fit: more recomputation, smaller micro-batches, more hosts.

    ``planner``: of what was asked.
    """
    tried = [config]
    if config.preset is None:
        tried += [replace(config, recompute=each) for each in ("selective", "full") if each != config.recompute]
    tried += [replace(each, micro=1) for each in tried if config.micro > 1]
    planners = [planner, *(planner.of(training_of(each)) for each in tried[1:])]
    for each, other in zip(tried[1:], planners[1:], strict=True):
        if any(other.peak(s).total <= usable_bytes(asked.cluster) for s in settings(other, asked.cluster)):
            return f"{_changed(config, each)} would fit"
    for each, other in zip(tried, planners, strict=True):
        larger = smallest_cluster(other, asked.cluster)
        if larger is not None:
            flags = [_changed(config, each), _batch(other.training, larger.cluster.ranks)]
            changed = " and ".join(flag for flag in flags if flag)
            return f"{_cluster(larger.cluster)}{f' with {changed}' if changed else ''} would fit"
    return "no number of hosts would; take GPUs with more memory or shorter sequences"


def _changed(config: PlanConfig, tried: PlanConfig) -> str:
    """Return the flags in which ``tried`` differs."""
    names = ("recompute", "micro")
    flags = [f"--{name} {getattr(tried, name)}" for name in names if getattr(tried, name) != getattr(config, name)]
    return " and ".join(flags)


def _batch(training: Training, ranks: int) -> str:
    """Return the flag of a global batch that so many ranks divide, if the one that is asked for does not."""
    together = training.micro * ranks
    if training.global_batch is None or training.global_batch % together == 0:
        return ""
    return f"--global-batch {-(-training.global_batch // together) * together}"
