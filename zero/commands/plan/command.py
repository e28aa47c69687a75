"""`zero plan`: what a training costs on a cluster, before it is rented.

Knows: the training that flags describe, the order of the work, what is printed, written and drawn, the call that starts
a setting, the exit codes. Does not know: equations (`zero.planning`), flags (`settings`). Wrong input is a `ValueError`
of one line that names the flag or the file. The same plan writes the same bytes: no file has a date or a measured time.
"""

from __future__ import annotations

import itertools
import json
import pkgutil
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...config import Offload, ShardingOptions
from ...core.buckets import MIB
from ...parameters.casting import put_casts
from ...planning.choose import Findings, enough_bytes, findings_of, name_of
from ...planning.hardware import Cluster, presets, read_hardware
from ...planning.model import Model, UnitWork
from ...planning.models.shapes import model_of, of_config, of_parameter_list
from ...planning.models.works import count_module, count_transformer, products_in_fp32
from ...planning.plan import PlannedSetting, Planner, usable_bytes
from ...planning.seconds.schedule import chrome_trace
from ...planning.setting import PlanSetting
from ...precision import MixedPrecision, Patterns, Precisions
from ..console import ACCENT, INSTALL_HINT, RESOLUTION, can_draw, figure_of, print_line, print_table
from ..runner import check_output, checking_input, fail
from .settings import PlanConfig

SOURCES = ("config", "parameters", "module")
HEADER = ("setting", "GB", "states", "activations", "gathered", "buckets", "s per step", "MFU", "GB sent per host")
FILES = {  # and what is printed about each
    "plan.json": "",
    "trace.json": "",
    "plan.png": "a dot is a simulated setting; no other beats those with names in both time and memory; star: the best",
    "plan-scale.png": (
        "each rank keeps its batch, so more ranks train a larger one; a band reaches from a good to a poor fabric. The "
        "fewer ranks share a copy, the more copies there are, whose gradients are summed one by one between hosts"
    ),
}
FARTHEST = 3.0  # times the fastest: slower settings would squeeze the others in plan.png
COLORS = ("#c98a1b", "#2b8a5a", "#2f6f9f", "#8a5fa8")
_CLASSES = {  # of the optimizer, by `--optimizer`, with arguments; fused kernels where torch has them on GPUs
    "adamw": "torch.optim.AdamW, fused=True",
    "adam": "torch.optim.Adam, fused=True",
    "momentum": "torch.optim.SGD, fused=True, momentum=0.9",
    "sgd": "torch.optim.SGD, fused=True",
    "adagrad": "torch.optim.Adagrad",
    "muon": "torch.optim.AdamW, module=model",
    "adamw8bit": "torchao.optim.AdamW8bit",
    "adamw4bit": "torchao.optim.AdamW4bit",
    "adamwfp8": "torchao.optim.AdamWFp8",
}
_MUON = '[{"params": matrices, "optimizer_class": torch.optim.Muon, "partition": "parameter"}, {"params": rest}]'


@checking_input(ValueError)
def run(config: PlanConfig) -> int:
    """Plan, print and write. The exit code is 1 if nothing fits, and 2 after wrong input."""
    hardware = presets() if config.hardware is None else read_hardware(config.hardware)
    cluster = hardware.cluster(config.cluster, nic=config.nic, fabric=config.fabric)
    cluster.gpu.peak(config.products)
    planner = planner_of(config)
    config.micro_batches(cluster.ranks)
    check_output(config.out)
    if hardware.measured:
        print_line(f"hardware as measured: {hardware.measured}")
    found = findings_of(planner, cluster, hardware.fabrics, always=config.all)
    _print(config, found)
    check_output(config.out, *FILES)  # the last plan's files, which stay until this one is made
    _write(config, found)
    return 0 if found.best else 1


def planner_of(config: PlanConfig) -> Planner:
    """Return the plan of the training that the flags describe."""
    given = [name for name in SOURCES if getattr(config, name) is not None]
    if len(given) != 1:
        found = "none" if not given else " and ".join(f"--{name}" for name in given)
        raise ValueError(f"the model needs exactly one of {', '.join(f'--{name}' for name in SOURCES)}, here {found}")
    works: Sequence[UnitWork] | None = None
    try:
        if config.config is not None:
            model = of_config(config.config)
            works = count_transformer(model, config.micro, config.sequence, config.param_dtype)
        elif config.parameters is not None:
            model = of_parameter_list(config.parameters)
        else:
            model, works = _of_module(config)
    except (ArithmeticError, RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"the model cannot be counted: {type(error).__name__}: {reason}") from error
    tokens = config.tokens_of_micro_batch
    works = works or [UnitWork(matmul_flops=2.0 * numel * tokens) for numel in model.unit_numels()]
    if config.fp32_modules and config.module is None:
        works = products_in_fp32(model, works, model.dtypes(config.rule), tokens)
    return Planner(model, works, config)


def _of_module(config: PlanConfig) -> tuple[Model, tuple[UnitWork, ...] | None]:
    """Return the model that ``PKG:CALLABLE`` makes, and the work of its units; None if it makes no loss."""
    text = str(config.module)
    if not all(text.partition(":")):
        raise ValueError(f"--module {text!r} must be PKG:CALLABLE, as in --module my_model:build")
    sys.path.insert(0, str(Path.cwd()))
    try:
        with torch.device("meta"):
            made: Any = pkgutil.resolve_name(text)()
    except Exception as error:
        raise ValueError(f"--module {text}: {type(error).__name__}: {error}") from error
    module, loss = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module) or not (loss is None or callable(loss)):
        raise ValueError(
            f"--module {text} returned {type(made).__name__}: it must return a module, or a module and a function of it"
        )
    model = model_of(module, text)
    if loss is None:
        return model, None
    module.to(config.param_dtype)
    if config.fp32_modules:
        precisions = Precisions(config.rule, module)
        for parameter in module.parameters():
            if precisions.of(parameter).param_dtype is torch.float32:
                parameter.data = parameter.detach().float()
        for border in precisions.borders:
            put_casts(border, None)
    with torch.device("meta"):
        return model, count_module(module, loss)


def _print(config: PlanConfig, found: Findings) -> None:
    """Print the table of settings, the recommendation, the smallest clusters and the rates of more ranks."""
    model, cluster, best = found.planner.model, found.cluster, found.best
    numel = model.numel
    size = f"{numel / 1e9:.2f} B" if numel >= 1e9 else f"{numel / 1e6:.2f} M"
    print_line(
        f"{model.name}: {size} parameters in {len(model.units)} units, "
        f"{_cluster(cluster)}, {config.precision}, {config.optimizer}, {config.micro_batches(cluster.ranks)} x "
        f"{config.micro} x {config.sequence:,} tokens per rank and step, recompute {config.recompute}"
    )
    if not found.planner.counts_activations:
        print_line("activations are not counted, and compute is 2 operations for each parameter and token")
    if shown := found.choices if config.all else found.shown:
        rows = [_row(choice, found) for choice in sorted(shown, key=lambda choice: (choice.seconds, choice.peak.total))]
        print_table(f"a rank can use {_gb(usable_bytes(cluster))} GB; * recommended, - does not fit", HEADER, rows)
        print_line("buckets: gradients and sums under way, of several at a time; all bytes are upper bounds")
        print_line(
            "over N ranks: sharding_factor=N, each N ranks share one copy; kept: reshard_after_forward, parameters "
            "stay gathered for the backward, whole (False) or each N neighbouring ranks share them (over N)"
        )
    for line in _recommendation(config, found, best) if best else ():
        print_line(line)
    for recompute, smallest in found.smallest.items():
        print_line(
            f"smallest cluster that fits, recompute {recompute}: {_cluster(smallest.cluster)}, "
            f"{name_of(smallest.setting)}, {_gb(smallest.peak.total)} of {_gb(smallest.usable)} GB{_beside(smallest)}"
        )
    for name, points in found.curves.items():
        rates = ", ".join(
            f"{_rate(p.tokens_per_second_of_rank)} at {p.ranks:,} ({_rate(p.low)}-{_rate(p.high)})"
            + ("" if p.fits else ", which does not fit")
            for p in (points[0], points[-1])
        )
        print_line(f"tokens/s per rank, {name}: {rates}")
    if best is None:
        changes = ["--recompute full"] * (config.recompute != "full") + ["--micro 1"] * (config.micro > 1)
        changes += ["more hosts", "shorter sequences", "GPUs with more memory"]
        fail(f"no setting fits into {_gb(usable_bytes(cluster))} GB per rank: try {', '.join(changes)}")


def _row(choice: PlannedSetting, found: Findings) -> list[str]:
    peak, step = choice.peak, choice.step
    sizes = [_gb(size) for size in (peak.total, peak.states, peak.activations, peak.gathered, peak.buckets)]
    name = ("* " if choice is found.best else "" if choice.fits else "- ") + name_of(choice.setting)
    if step is None:
        return [name, *sizes, "", "", ""]
    low, high = found.bands.get(choice.setting, (step.seconds, step.seconds))
    band = f"{step.seconds:.3g}" if high - low < 0.005 * low else f"{step.seconds:.3g} ({low:.3g}-{high:.3g})"
    return [name, *sizes, band, f"{step.utilization:.1%}", _gb(step.left_host)]


def _recommendation(config: PlanConfig, found: Findings, best: PlannedSetting) -> Iterator[str]:
    """Yield the lines about the recommended setting: its reason, its time and its price, its buckets, its call."""
    assert best.step is not None
    cluster, step, setting = found.cluster, best.step, best.setting
    yield f"recommended: {name_of(setting)}: fits with {_gb(best.usable - best.peak.total)} GB to spare{_beside(best)}"
    waits = sorted(step.parts.items(), key=lambda part: -part[1])
    of_time = ", ".join(f"{s / step.seconds:.0%} {name}" for name, s in waits if s > 0.005 * step.seconds)
    yield f"of its time: {of_time}"
    rate = step.tokens_per_second
    yield f"{rate:,.0f} tokens/s, {rate / cluster.ranks:,.0f} per rank; ranks send {_gb(step.sent)} GB per step"
    if config.tokens:
        yield f"{config.tokens:.3g} tokens: {config.tokens / rate / 86400:.1f} days"
    if config.price:
        yield f"${config.price * cluster.ranks / 3600 * 1e9 / rate:,.2f} for a billion tokens"
    if found.spread:
        yield found.spread
    named = _cap_argument(setting, found.planner)
    line = f"bucket_cap_mb: {setting.bucket_bytes // MIB}"
    line += " (the default)" if not named else f" ({named})" if named == '"auto"' else ""
    line += "".join(f"; {other} would cost {change:+.1%}" for other, change in found.other_caps)
    if setting.factor > 1:
        enough = enough_bytes(cluster, setting.factor) / MIB
        line += f" (latency is at most a tenth of a ring's time from {enough:,.0f} MiB on)"
    yield line
    yield f"start: {start_of(setting, found.planner)}"


def _beside(choice: PlannedSetting) -> str:
    """Return what a rank needs beside its own memory."""
    place = {"": "", "host": "of the host's memory", "disk": "of a disk"}[choice.setting.states_on]
    return f", with {_gb(choice.offloaded)} GB {place} for each rank" if place else ""


def _gb(nbytes: float) -> str:
    """Return GB (10**9 bytes) with one decimal, or three digits of less than one."""
    return f"{nbytes / 1e9:.1f}" if nbytes >= 1e9 or nbytes < 1e3 else f"{nbytes / 1e9:.3g}"


def _rate(tokens: float) -> str:
    return f"{tokens:,.0f}" if tokens >= 10 else f"{tokens:.2g}"


def _cluster(cluster: Cluster) -> str:
    network = f", {cluster.nic * 8 / 1e9:,.0f} Gb/s a host" if cluster.hosts > 1 else ""
    hosts = f"{cluster.hosts} hosts" if cluster.hosts > 1 else "1 host"
    return f"{cluster.ranks} {cluster.gpu.name} ({hosts}{network})"


def start_of(setting: PlanSetting, planner: Planner) -> str:
    """Return the call of `ZeroOptimizer`: its stage, and the options that are not the default."""
    default, options = ShardingOptions().arguments(), setting.arguments()
    given = {name: _code(options[name]) for name in default if _code(options[name]) != _code(default[name])}
    given |= {"stage": str(setting.stage), "bucket_cap_mb": _cap_argument(setting, planner)}
    named = [f"{name}={given[name]}" for name in default if given.get(name)]
    params = _MUON if setting.optimizer == "muon" else "model"
    return f"ZeroOptimizer({', '.join([params, _CLASSES[setting.optimizer], *named])})"


def _cap_argument(setting: PlanSetting, planner: Planner) -> str:
    """Return ``bucket_cap_mb`` as an argument; empty if buckets have the default size."""
    if setting.bucket_sizes == planner.bucket_sizes(setting, None):
        return ""
    by_units = setting.bucket_sizes == planner.bucket_sizes(setting, "auto")
    return '"auto"' if by_units else str(setting.bucket_bytes // MIB)


def _code(value: object) -> str:
    """Return the value of an option as Python code."""
    if isinstance(value, Patterns):
        return "{" + ", ".join(f'"{pattern}": {_code(each)}' for pattern, each in value.pairs) + "}"
    if isinstance(value, MixedPrecision):
        output = "" if value.output_dtype is None else f", output_dtype={value.output_dtype}"
        return f"MixedPrecision({value.param_dtype}{output})"
    if isinstance(value, Offload):
        parameters = "" if value.parameters is None else f', parameters="{value.parameters}"'
        return f'Offload("{value.states}"{parameters})'
    return f'"{value}"' if isinstance(value, str) else str(value)


def _write(config: PlanConfig, found: Findings) -> None:
    """Write and draw the files, and print their names."""
    planner, cluster, best = found.planner, found.cluster, found.best
    flags = {name: getattr(config, name) for name in itertools.chain(*config.GROUPS.values())}
    flags = {name: value.name if isinstance(value, Path) else value for name, value in flags.items()}
    written = {
        "format": 3,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "config": {name: value for name, value in flags.items() if name not in ("out", "all", "trace")},
        "model": {
            "name": planner.model.name,
            "parameters": planner.model.numel,
            "units": len(planner.model.units),
            "activations": "counted" if planner.counts_activations else "not counted",
        },
        "cluster": {**asdict(cluster), "gpu": cluster.gpu.name, "usable_bytes": usable_bytes(cluster)},
        "choices": [_numbers(choice, seconds_by_fabric=found.bands.get(choice.setting)) for choice in found.choices],
        "recommended": best and _numbers(best, start=start_of(best.setting, planner)),
        "smallest": [_numbers(each, recompute=recompute) for recompute, each in found.smallest.items()],
        "scale": [{"name": name, "points": list(map(asdict, points))} for name, points in found.curves.items()],
    }
    (config.out / "plan.json").write_text(json.dumps(written, default=str) + "\n")
    if config.trace and best is not None:
        events = planner.step(best.setting, cluster, trace=True).events
        (config.out / "trace.json").write_text(json.dumps({"traceEvents": chrome_trace(events)}) + "\n")
    if not can_draw():
        print_line(f"no pictures: {INSTALL_HINT}")
    elif best is not None:
        _draw_choices(config.out / "plan.png", found)
        if found.curves:
            _draw_scale(config.out / "plan-scale.png", found)
    files = [name for name in FILES if (config.out / name).exists()]
    for name in filter(FILES.get, files):
        print_line(f"{name}: {FILES[name]}")
    print_line(f"wrote {', '.join(files)} in {config.out}")


def _numbers(choice: PlannedSetting, **more: Any) -> dict[str, Any]:
    """Return what plan.json has of a setting."""
    return {
        "name": name_of(choice.setting),
        "setting": {**asdict(choice.setting), "bucket_bytes": choice.setting.bucket_bytes},
        "bytes": asdict(choice.peak),
        "total_bytes": choice.peak.total,
        "offloaded_bytes": choice.offloaded,
        "fits": choice.fits,
        "step": choice.step and asdict(choice.step),
        **more,
    }


def _draw_choices(path: Path, found: Findings) -> None:
    """Draw the simulated settings in seconds and GB, with names for those that no other one beats and for the best."""
    from matplotlib import colormaps

    shown, cluster = found.shown, found.cluster
    slowest = FARTHEST * min(choice.seconds for choice in found.choices)
    others = [choice for choice in found.choices if choice.seconds <= slowest and choice not in shown]
    name = found.planner.model.name
    figure, axes = figure_of(f"{name} on {cluster.ranks:,} {cluster.gpu.name}, planned", (11.0, 6.0))
    axes.axhline(usable_bytes(cluster) / 1e9, color=ACCENT, linestyle="--", label="memory that a rank can use")
    places = [choice.seconds for choice in others], [choice.peak.total / 1e9 for choice in others]
    axes.scatter(*places, s=30, facecolors="none", edgecolors="0.7", label="other settings")
    for number, choice in enumerate(shown):
        marker, size = ("*", 150) if choice is found.best else ("o", 46)
        color = [colormaps["viridis"](number / len(shown))]
        place, name = (choice.seconds, choice.peak.total / 1e9), name_of(choice.setting)
        axes.scatter(*place, s=size, c=color, marker=marker, label=name, zorder=3)
    axes.set(xlabel=f"seconds per step (up to {FARTHEST:g} times the fastest)", ylabel="GB per rank (10⁹ bytes)")
    axes.set(xlim=(0, None), ylim=(0, None))
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=RESOLUTION)


def _draw_scale(path: Path, found: Findings) -> None:
    """Draw tokens per second of a rank over the number of ranks, with bands. The longest line's points have ticks."""
    figure, axes = figure_of(f"{found.planner.model.name} on {found.cluster.gpu.name}, planned")
    for (name, points), color in zip(found.curves.items(), itertools.cycle(COLORS)):
        ranks = [point.ranks for point in points]
        rates = [point.tokens_per_second_of_rank for point in points]
        axes.plot(ranks, rates, color=color, label=name)
        axes.fill_between(ranks, [p.low for p in points], [p.high for p in points], color=color, alpha=0.15)
        faces = [color if point.fits else "white" for point in points]
        axes.scatter(ranks, rates, s=22, facecolors=faces, edgecolors=color, zorder=3)
    hollow = any(not point.fits for points in found.curves.values() for point in points)
    label = f"ranks, each with the same batch (bands: fabrics{'; hollow: does not fit' if hollow else ''})"
    axes.set(xlabel=label, ylabel="tokens/s per rank", xscale="log", ylim=(0, None))
    ticks = [point.ranks for point in max(found.curves.values(), key=len)]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8, rotation=30)
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=8, loc="lower left")
    figure.savefig(path, dpi=RESOLUTION)
