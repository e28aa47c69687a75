"""`zero train`: the training of `zero.examples.train` on ranks that it starts, and the measurements of each rank.

Knows: which settings fit together, what is measured, and when. Does not know: the loop, how ranks are started, or how
results are printed.

    micro-batch j of the M of a step goes to rank j mod W and is the same data for every W;
    the summed gradient is divided by M.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler

from ...core.stage import STAGES
from ...examples.train import LENGTH, ByteModel, build, choose_device, read, train
from ...planning.memory import MemoryPlan
from ...planning.models.shapes import model_of
from ...planning.setting import PlanSetting
from ...precision import PRECISIONS
from ...runtime.process_group import bind_to_parent, under_launcher
from ..console import counted
from ..runner import check_output, checking_input, launch_ranks, process_group, run_rank
from .report import KINDS, PLAIN, next_command, write_report
from .settings import DEFAULT_RANKS, TrainConfig


def run(config: TrainConfig) -> int:
    """Train on ranks that are started here, unless a launcher has started this process. Return the exit code."""
    launched, first = "WORLD_SIZE" in os.environ, os.environ.get("RANK", "0") == "0"
    with checking_input():
        world = int(os.environ.get("WORLD_SIZE", config.ranks or DEFAULT_RANKS))
        if config.ranks not in (None, world):
            raise ValueError(
                f"--ranks {config.ranks}, but the launcher started {world} (WORLD_SIZE): omit --ranks or let them agree"
            )
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        device, remark = choose_device(config.device, local, torch.cuda.device_count())
        config = replace(config, device="cuda" if device == "cuda" else "cpu")
        config.reshard_group_size(world)
        args = _arguments(config)
        read(args)
        if not launched:  # the library checks the rest on a throw-away model
            alone = replace(config, sharding_factor=None, reshard_after_forward=True)
            build(args, ByteModel(4, 1).to(device), **alone.arguments()).close()
        if first:
            if config.checkpoint is not None:
                check_output(config.checkpoint, flag="--checkpoint")
            check_output(config.out)
    if first:
        with torch.device("meta"):
            numel = sum(parameter.numel() for parameter in ByteModel(config.width, config.layers).parameters())
        ranks = counted(world, "GPU rank" if device == "cuda" else "CPU rank")
        print(
            *filter(None, [remark]),
            f"training {numel:,} parameters on {ranks}, stage {config.stage}, on the bytes of {args.data}",
            f"{counted(config.steps, 'step')} of {config.micro_batches} x {config.batch} x {LENGTH} bytes; losses are "
            "in nats per byte",
            sep="\n",
            flush=True,
        )
    if launched or world == 1:
        work(config)
    else:
        launch_ranks(__name__, config, world)
    if first:
        print(f"try next: {next_command(sys.argv[1:], world)}; for your own model: zero verify --help")
    return 0


def _arguments(config: TrainConfig) -> argparse.Namespace:
    """Return the arguments of the example."""
    default = str(nn.functional.__file__)
    return argparse.Namespace(**{**vars(config), "data": default if config.data is None else str(config.data)})


def work(config: TrainConfig) -> None:
    """Train as one rank. Rank 0 writes the report. All ranks end together, so that a launcher that restarts ranks
    starts them all if one fails at the end."""
    torch.set_num_threads(config.threads)
    device, args = config.device or "cpu", _arguments(config)
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    if under_launcher():
        bind_to_parent()
    with nullcontext() if alone else process_group(device):
        torch.manual_seed(0)
        model = ByteModel(config.width, config.layers).to(device)
        optimizer = build(args, model, **config.arguments())
        scaler = None
        if config.mixed_precision == PRECISIONS["fp16"]:
            scaler = GradScaler(device)
            scaler.scale(torch.zeros(1, device=device))  # a rank without a micro-batch scales nothing else
        before_step = dict(optimizer.describe().bytes)
        optimizer.register_step_pre_hook(lambda *_: before_step.update(optimizer.describe().bytes))
        losses, validation = train(args, device, model, optimizer, scaler)
        held = optimizer.describe()  # states exist and peaks are final, but gradients on a GPU are gone after a step
        at_step = {kind: before_step[kind] for kind in ("parameters", "gradients")}
        facts = {"measured": {**held.bytes, **at_step}, "formula": held.formula_bytes}
        ranks = [json.loads(data) for data in optimizer.exchange(json.dumps(facts).encode())]
        optimizer.close()
        if optimizer.rank == 0:
            record = {
                "world_size": len(ranks),
                "stage": config.stage,
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "losses": losses,
                "validation_loss": validation,
                "params_sha256": parameters_sha256(model),
                "ranks": ranks,
                "formula_bytes_by_stage": _by_stage(config, model, len(ranks)),
                "config": config.written(),
            }
            write_report(record, config)
        if not alone:
            dist.barrier()


def _by_stage(config: TrainConfig, model: nn.Module, ranks: int) -> dict[str, dict[str, int]]:
    """Return what the plain loop holds, and rank 0 at each stage, by formulas. The optimizer must be closed."""
    shapes = model_of(model, "ByteModel")
    grouped = [replace(shape, group=int(len(shape.shape) <= 1)) for shape in shapes.parameters]  # as `build` does
    on_cpu = config.device != "cuda"  # where states on the host stay where they are
    options: dict[str, Any] = {
        "device": config.device or "cpu",
        "mixed_precision": config.mixed_precision,
        "offload": None if on_cpu and config.offload and config.offload.on_host else config.offload,
        "rounding": config.rounding,
        "bucket_cap_mb": None if config.bucket_cap_mb == "auto" else config.bucket_cap_mb,
    }
    # alone, a rank keeps one copy of each at stage 2; at stage 0 sums lie apart
    settings = {PLAIN: PlanSetting(stage=2, **options)}
    for stage in STAGES:
        factor = config.sharding_factor if stage else None
        settings[f"stage {stage}"] = PlanSetting(stage=stage, world_size=ranks, sharding_factor=factor, **options)
    plan = MemoryPlan(replace(shapes, parameters=tuple(grouped)))
    found = {name: plan.of_rank(setting, 0) for name, setting in settings.items()}
    return {name: {kind: getattr(held, kind) for kind in KINDS} for name, held in found.items()}


def parameters_sha256(model: nn.Module) -> str:
    """SHA-256 of the whole parameters: fp32, little-endian, contiguous, in order of registration, ties once."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        values = parameter.detach().to("cpu", torch.float32).contiguous().numpy()
        digest.update(values.astype("<f4", copy=False).tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(run_rank(work))
