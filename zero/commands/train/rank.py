"""One rank of `zero train`: the plain training loop of a byte-level GPT, with ZeroOptimizer for torch's optimizer.

Knows: the order group - corpus - model - optimizer - steps - validation - report, and backward - clip - step -
zero_grad - save; the classes of torch.optim, and which parameters Muon gets. Does not know: how ranks are started, or
how results are printed.

    micro-batch j of the M of a global step goes to rank j mod W and is the same data for every W;
    the summed gradient is divided by M. If W does not divide M, the last of the ceil(M / W) rounds of a step has
    fewer micro-batches than ranks.

After each step the ranks exchange the losses of their micro-batches and put them into the order of the micro-batches,
so that a loss has the same bits for every number of ranks.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from collectives.messages import Traffic

from ...config import PRECISIONS
from ...core.stage import Placement
from ...optimizer import ZeroOptimizer
from ...runtime.process_group import bind_to_parent, under_launcher
from ...state.describe import Description
from ..console import Console
from ..flags import from_flags, to_flags
from ..runner import process_group, run_rank
from .data import load_corpus
from .model import build_model, loss_fn, parameters_sha256
from .report import write_report
from .saves import Saves, saving
from .settings import TrainConfig

MUON = "muon"  # the one optimizer of two classes
VALIDATION_WINDOWS = 256


def work(config: TrainConfig) -> None:
    """Train as one rank. Rank 0 writes the report. All ranks end together, so that a launcher that restarts ranks
    starts them all if one fails at the end."""
    torch.set_num_threads(config.threads)
    console = Console(config.steps) if int(os.environ.get("RANK", "0")) == 0 else None
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    if under_launcher():
        bind_to_parent()
    with nullcontext() if alone else process_group():
        try:
            record = RankTraining(config).run(console)
        finally:
            if console is not None:
                console.finish()
        if console is not None:
            write_report(record, config.out, console)
        if not alone:
            dist.barrier()


class RankTraining:
    """The training of one rank. ``losses`` (nats per byte, over all micro-batches) has an entry for each step of the
    run, and ``step_ms`` for each that was taken here, not before a checkpoint. All ranks must make every call."""

    def __init__(self, config: TrainConfig) -> None:
        """Read the text, and build the model and the optimizer."""
        self.losses: list[float] = []
        self.step_ms: list[float] = []
        self._config = config
        self._corpus = load_corpus(config.data, config.sequence)
        self._model = build_model(config.preset, config.sequence, config.seed)
        self._optimizer = make_optimizer(config, self._model)
        self._optimizer.divisor = config.micro_batches
        self._scaler = torch.amp.GradScaler("cpu", enabled=config.mixed_precision == PRECISIONS["fp16"])
        self._scaler.scale(torch.zeros(1))  # a rank without a micro-batch scales nothing, and a scaler begins with that

    def run(self, console: Console | None) -> dict[str, Any]:
        """Train, validate, and close the optimizer. Return the content of run.json."""
        config, optimizer = self._config, self._optimizer
        check_same_text(optimizer, self._corpus.sha256)
        with saving(config, optimizer, self._corpus.sha256) as saves:
            facts = self._take_steps(saves, console)
            bits_per_byte = self._validate()
            ranks = [json.loads(data) for data in optimizer.exchange(json.dumps(facts).encode())]
        description, rounds = optimizer.describe(), math.ceil(config.micro_batches / optimizer.world_size)
        optimizer.close()
        return {
            "world_size": len(ranks),
            "stage": config.stage,
            "steps": config.steps,
            "micro_batches": config.micro_batches,
            "parameters": sum(parameter.numel() for parameter in self._model.parameters()),
            "losses": self.losses,
            "validation_bits_per_byte": bits_per_byte,
            "params_sha256": parameters_sha256(self._model),
            "step_ms_median": float(np.median(self.step_ms)) if self.step_ms else None,
            "bytes_per_rank": ranks[0]["measured"],
            "formula_bytes_per_rank": ranks[0]["formula"],
            "traffic_bytes_per_step": sum(rank["payload_sent"] for rank in ranks),
            "formula_traffic_bytes_per_step": description.formula_traffic_bytes(rounds, rounds),
            "control_bytes_per_step": sum(rank["control_sent"] for rank in ranks),
            "collective": description.collective,
            "ranks": ranks,
            "corpus": {"source": self._corpus.source, "sha256": self._corpus.sha256},
            "config": to_flags(config),
        }

    def _take_steps(self, saves: Saves | None, console: Console | None) -> dict[str, Any]:
        """Take all steps that a checkpoint does not have yet. Return the measurements of this rank in the last one, or
        now if there is none left."""
        optimizer = self._optimizer
        if saves is not None:
            self.losses += saves.resume(self._scaler)
        begin, ranks = len(self.losses), optimizer.world_size
        if console is not None and begin:
            console.line(f"goes on from step {begin} on {ranks} rank{'s' if ranks > 1 else ''}")
        facts = self._facts(optimizer.describe(), optimizer.traffic)
        for step in range(begin, self._config.steps):
            start, before = time.perf_counter(), optimizer.traffic
            losses = self._backwards(step)
            held = optimizer.describe() if step + 1 == self._config.steps else None
            self._update()
            if held is not None:
                facts = self._facts(held, before)
            optimizer.zero_grad()
            self.step_ms.append(1000 * (time.perf_counter() - start))
            in_order = self._by_turns(losses, self._config.micro_batches)
            self.losses.append(math.fsum(in_order) / len(in_order))
            if console is not None:
                console.advance(step + 1, f"loss {self.losses[-1]:.3f}")
            if saves is not None:
                saves.after_step(self.losses, self._scaler)
        return facts

    def _backwards(self, step: int) -> list[float]:
        """Run this rank's micro-batches of a step, and return their losses."""
        config, optimizer, losses = self._config, self._optimizer, []
        with self._turns():
            for index in range(optimizer.rank, config.micro_batches, optimizer.world_size):
                data = self._corpus.micro_batch(config.seed, step, index, config.batch, config.sequence)
                loss = loss_fn(self._model(data.inputs), data.targets)
                self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                losses.append(loss.item())
        return losses

    def _turns(self) -> AbstractContextManager[None]:
        """Return the context of a step's backwards, in which a rank that has fewer micro-batches takes its turns.

        It does so by itself in clip and step, but at stage 3 others may gather units in their last forward, and a
        scaler, which comes before, fails on a rank without a gradient.
        """
        uneven = self._config.micro_batches % self._optimizer.world_size != 0
        needed = self._config.row.parameters is Placement.SHARD or self._scaler.is_enabled()
        return self._optimizer.join() if uneven and needed else nullcontext()

    def _update(self) -> None:
        self._scaler.unscale_(self._optimizer)
        if self._config.clip is not None:
            self._optimizer.clip_grad_norm_(self._config.clip)
        self._scaler.step(self._optimizer)
        self._scaler.update()

    def _facts(self, after_backward: Description, before: Traffic) -> dict[str, Any]:
        """Return what this rank held and has sent since then, in bytes: its entry of ``ranks`` in run.json. States
        exist, and peaks are final, after the update."""
        now, sent = self._optimizer.describe(), self._optimizer.traffic
        held = {kind: after_backward.bytes[kind] for kind in ("parameters", "gradients")}
        return {
            "rank": self._optimizer.rank,
            "measured": {**now.bytes, **held},
            "formula": now.formula_bytes,
            "payload_sent": sent.payload_sent - before.payload_sent,
            "control_sent": sent.control_sent - before.control_sent,
        }

    @torch.no_grad()
    def _validate(self) -> float:
        """Return the bits per byte of the validation text; the same bits on every rank, for every number of ranks.

        Every rank runs the model equally often (a rank without a batch of its own repeats one), since a forward may be
        a collective.
        """
        rank, world = self._optimizer.rank, self._optimizer.world_size
        batches = self._corpus.validation_batches(self._config.batch, self._config.sequence, VALIDATION_WINDOWS)
        nats = []
        for turn in range(rank, rank + len(batches) + -len(batches) % world, world):
            batch = batches[turn % len(batches)]
            nats.append(loss_fn(self._model(batch.inputs), batch.targets).item() * batch.targets.numel())
        in_order = self._by_turns(nats, len(batches))
        return math.fsum(in_order) / sum(batch.targets.numel() for batch in batches) / math.log(2)

    def _by_turns(self, mine: list[float], count: int) -> list[float]:
        """Exchange numbers that the ranks have in turn, and return the first ``count`` in order."""
        sent = self._optimizer.exchange(np.array(mine, dtype="<f8").tobytes())
        parts = [np.frombuffer(part, dtype="<f8") for part in sent]
        return [float(parts[place % len(parts)][place // len(parts)]) for place in range(count)]


def check_same_text(optimizer: ZeroOptimizer, sha256: str) -> None:
    """Raise `ValueError` on every rank if ranks read other text. All ranks; ``sha256``: of the text."""
    digests = [data.decode() for data in optimizer.exchange(sha256.encode())]
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise ValueError(
                f"rank {rank} reads other text than rank 0 (SHA-256 {digest[:12]} and {digests[0][:12]}): give every "
                "host the same files with --data"
            )


def make_optimizer(config: TrainConfig, model: nn.Module, *, alone: bool = False) -> ZeroOptimizer:
    """Build the optimizer of a configuration. ``alone``: for one rank without a group."""
    options = replace(config, sharding_factor=None, reshard_after_forward=True) if alone else config
    return ZeroOptimizer(
        _param_groups(config, model),
        torch.optim.AdamW if _is_muon(config) else _class(config.optimizer),
        module=model,
        **options.arguments(),
        **_arguments(config),
    )


def _is_muon(config: TrainConfig) -> bool:
    return config.optimizer.lower() == MUON


def _param_groups(config: TrainConfig, model: nn.Module) -> nn.Module | list[dict[str, Any]]:
    """Return what the optimizer updates: the model, or for Muon the matrices of the blocks, and the rest for AdamW.

    Muon's updates are scaled to the size of AdamW's, so that one learning rate does for both (Liu et al., "Muon is
    Scalable for LLM Training", 2025, section 2.2).
    """
    if not _is_muon(config):
        return model
    named = list(model.named_parameters())
    matrices = [(name, p) for name, p in named if name.startswith("blocks.") and p.dim() == 2]
    rest = [(name, p) for name, p in named if not (name.startswith("blocks.") and p.dim() == 2)]
    muon = {"optimizer_class": torch.optim.Muon, "partition": "parameter", "adjust_lr_fn": "match_rms_adamw"}
    return [{"params": matrices, **muon, **_arguments(config)}, {"params": rest}]


def _class(name: str) -> type[Optimizer]:
    """Return the class of torch.optim with this name in lower case."""
    found: dict[str, type[Optimizer]] = {
        item.__name__.lower(): item
        for item in vars(torch.optim).values()
        if isinstance(item, type) and issubclass(item, Optimizer) and item is not Optimizer
    }
    if name.lower() not in found:
        raise ValueError(f"--optimizer {name}: torch.optim has no such class. It has {', '.join(sorted(found))}")
    return found[name.lower()]


def _arguments(config: TrainConfig) -> dict[str, Any]:
    arguments: dict[str, Any] = {"lr": config.lr}
    if config.weight_decay is not None:
        arguments["weight_decay"] = config.weight_decay
    if config.fused:
        arguments["fused"] = True
    return arguments


if __name__ == "__main__":
    sys.exit(run_rank(lambda settings: work(from_flags(TrainConfig, settings))))
