"""`zero plan`: what a training costs on a cluster, before it is rented.

Knows: the order of the work, the lines and the table, the exit codes. Does not know: equations (`zero.planning`), how
the files are written (`written`) and drawn (`pictures`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from ...planning.choose import enough_bytes, frontier, name_of, settings, smallest_cluster
from ...planning.hardware import Cluster
from ...planning.plan import MIB, Choice, Planner, usable_bytes
from ..console import INSTALL_HINT, Console
from ..runner import check_output, fail, reports_errors
from ..train.plots import can_draw
from .findings import Findings
from .inputs import Asked, asked_of, training_of
from .pictures import draw_choices, draw_scale
from .settings import PlanConfig
from .start import start_of
from .written import write

__all__ = ["run"]

NOTHING_FITS, WRONG_INPUT = 1, 2
FILES = ("plan.json", "plan.png", "plan-scale.png", "trace.json")


@reports_errors
def run(config: PlanConfig) -> int:
    """Plan, print and write. The exit code is 1 if nothing fits, and 2 after wrong input."""
    begin = time.perf_counter()
    try:
        asked = asked_of(config)
        check_output(config.out, *FILES)
    except ValueError as error:
        fail(error)
        return WRONG_INPUT
    console, planner = Console(), Planner(asked.training)
    choices = [planner.choice(each, asked.cluster, always=config.all) for each in settings(planner, asked.cluster)]
    found = Findings.of(asked, planner, choices)
    _print(config, found, console)
    code = 0
    if found.best is None:
        gb = usable_bytes(asked.cluster) / 1e9
        code = fail(f"no setting fits into {gb:.1f} GB of a rank: {_smallest_change(config, asked)}")
        code = NOTHING_FITS
    files = write(config, found, planner)
    if can_draw():
        files += [draw_choices(config.out, found)] if found.best else []
        files += [draw_scale(config.out, found)] if found.curves else []
    else:
        console.line(f"no pictures: {INSTALL_HINT}")
    console.line(f"wrote {', '.join(files)} in {config.out}; {time.perf_counter() - begin:.1f} s beyond imports")
    return code


def _print(config: PlanConfig, found: Findings, console: Console) -> None:
    training, cluster = found.asked.training, found.asked.cluster
    micro_batches = training.micro_batches(cluster.ranks)
    console.line(
        f"{training.model.name}: {training.model.numel / 1e9:.2f} B parameters in {len(training.model.units)} units, "
        f"{_cluster(cluster)}, {config.precision}, {config.optimizer}, {micro_batches} x {training.micro} x "
        f"{training.sequence:,} tokens of a rank and step, checkpoint {training.checkpoint}"
    )
    if not training.counts_activations:
        console.line("activations are not counted, and compute is 2 operations for each parameter and token")
    shown = found.choices if config.all else frontier(found.choices)
    if found.best and found.best not in shown:
        shown = [*shown, found.best]
    header = ["setting", "GB", "states", "activations", "gathered", "buckets", "s a step", "MFU", "left host, GB", ""]
    rows = [_row(choice, found) for choice in sorted(shown, key=lambda choice: (choice.seconds, choice.peak.total))]
    if rows:
        console.table(f"a rank has {usable_bytes(cluster) / 1e9:.1f} GB; * recommended", header, rows)
    if found.best:
        for line in _recommendation(config, found, found.best):
            console.line(line)
    for smallest in found.smallest:
        console.line(
            f"smallest cluster that fits, checkpoint {smallest.checkpoint}: {_cluster(smallest.found.cluster)}, "
            f"{name_of(smallest.found.setting)}, {smallest.found.peak.total / 1e9:.1f} of "
            f"{smallest.found.usable / 1e9:.1f} GB"
        )
    for curve in found.curves:
        ends = (curve.points[0], curve.points[-1])
        rates = ", ".join(f"{p.tokens_per_second:,.0f} at {p.ranks:,} ({p.low:,.0f}-{p.high:,.0f})" for p in ends)
        console.line(f"tokens/s of a GPU, {curve.name}: {rates}")


def _row(choice: Choice, found: Findings) -> list[str]:
    peak, step = choice.peak, choice.step
    sizes = [f"{size / 1e9:.1f}" for size in (peak.total, peak.states, peak.activations, peak.gathered, peak.buckets)]
    mark = "*" if choice is found.best else "" if choice.fits else "does not fit"
    if step is None:
        return [name_of(choice.setting), *sizes, "", "", "", mark]
    low, high = found.bands.get(choice.setting, (step.seconds, step.seconds))
    band = f"{step.seconds:.3g}" if high - low < 0.005 * low else f"{step.seconds:.3g} ({low:.3g}-{high:.3g})"
    times = [band, f"{step.utilization:.1%}", f"{step.left_host / 1e9:.1f}"]
    return [name_of(choice.setting), *sizes, *times, mark]


def _recommendation(config: PlanConfig, found: Findings, best: Choice) -> Sequence[str]:
    assert best.step is not None
    cluster, step = found.asked.cluster, best.step
    reasons = [f"fits with {(best.usable - best.peak.total) / 1e9:.1f} GB to spare"]
    others = [each for each in found.choices if each.fits and name_of(each.setting) != name_of(best.setting)]
    if others:
        other = min(others, key=lambda choice: choice.seconds)
        reasons.append(
            f"{other.seconds / step.seconds - 1:+.1%} time and {other.peak.total / best.peak.total - 1:+.0%} memory "
            f"with {name_of(other.setting)}"
        )
    waits = sorted(((part, share) for part, share in step.parts.items() if share > 0.005 * step.seconds), key=_second)
    of_time = ", ".join(f"{share / step.seconds:.0%} {part}" for part, share in waits)
    lines = [f"recommended: {name_of(best.setting)}: {'; '.join(reasons)}", f"its seconds: {of_time}"]
    lines.append(
        f"{step.tokens_per_second:,.0f} tokens/s, {step.tokens_per_second / cluster.ranks:,.0f} of a GPU; ranks send "
        f"{step.sent / 1e9:.1f} GB a step"
    )
    if config.tokens:
        lines.append(f"{config.tokens:.3g} tokens: {config.tokens / step.tokens_per_second / 86400:.1f} days")
    if config.price:
        dollars = config.price * cluster.ranks / 3600 * 1e9 / step.tokens_per_second
        lines.append(f"${dollars:,.2f} for a billion tokens")
    lines.append(_buckets(found, best))
    lines.append(f"start: {start_of(config, best.setting, cluster, found.micro_batches)}")
    return lines


def _buckets(found: Findings, best: Choice) -> str:
    cap, cluster = best.setting.bucket_bytes // MIB, found.asked.cluster
    line = f"bucket_cap_mb: {cap}"
    for other, change in found.other_caps:
        line += f"; {other} would cost {change:+.1%}"
    if best.setting.factor > 1:
        enough = enough_bytes(cluster, best.setting.factor) / MIB
        line += f" (latency is at most a tenth of a ring's time from {enough:,.0f} MiB on)"
    return line


def _second(pair: tuple[str, float]) -> float:
    return -pair[1]


def _cluster(cluster: Cluster) -> str:
    network = f", {cluster.nic * 8 / 1e9:,.0f} Gb/s a host" if cluster.hosts > 1 else ""
    hosts = f"{cluster.hosts} hosts" if cluster.hosts > 1 else "1 host"
    return f"{cluster.ranks} {cluster.gpu.name} ({hosts}{network})"


def _smallest_change(config: PlanConfig, asked: Asked) -> str:
    """Return the first change that makes a setting fit: more checkpointing, smaller micro-batches, more hosts."""
    tried = [config]
    if config.preset is None:
        tried += [replace(config, checkpoint=each) for each in ("selective", "full") if each != config.checkpoint]
    tried += [replace(each, micro=1) for each in tried if config.micro > 1]
    for each in tried[1:]:
        planner = Planner(training_of(each))
        if any(planner.peak(s).total <= usable_bytes(asked.cluster) for s in settings(planner, asked.cluster)):
            micro = f" and --micro {each.micro}" if each.micro != config.micro else ""
            return f"--checkpoint {each.checkpoint}{micro} would fit"
    for each in tried:
        larger = smallest_cluster(Planner(training_of(each)), asked.cluster)
        if larger is not None:
            return f"{_cluster(larger.cluster)} with --checkpoint {each.checkpoint} would fit"
    return "no number of hosts would; take GPUs with more memory or shorter sequences"
