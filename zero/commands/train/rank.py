"""One rank of `zero train`: a byte-level GPT in the loop of `zero.examples.train`.

Knows: the order group - corpus - model - optimizer - steps - validation - report, and what is measured. Does not know:
the loop, how ranks are started, or how results are printed.

    micro-batch j of the M of a global step goes to rank j mod W and is the same data for every W;
    the summed gradient is divided by M. If W does not divide M, the last of the ceil(M / W) rounds of a step has
    fewer micro-batches than ranks.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler

from ...core.stage import Placement
from ...examples.train import Batch, evaluate, mean_over_ranks, train_steps
from ...optimizer import ZeroOptimizer
from ...planning.models.shapes import model_of
from ...planning.stages import bytes_by_stage
from ...precision import PRECISIONS
from ...runtime.process_group import bind_to_parent, under_launcher
from ..console import Console
from ..flags import from_flags, to_flags
from ..runner import counted, process_group, run_rank
from .data import load_corpus
from .model import build_model, loss_fn, parameters_sha256
from .optimizers import arguments_of, classes_of, make_optimizer
from .report import write_report
from .saves import Saves, saving
from .settings import TrainConfig

HELD = ("parameters", "gradients", "optimizer")  # kinds of bytes between steps
VALIDATION_WINDOWS = 256


def work(config: TrainConfig) -> None:
    """Train as one rank. Rank 0 writes the report. All ranks end together, so that a launcher that restarts ranks
    starts them all if one fails at the end."""
    torch.set_num_threads(config.threads)
    console = Console(config.steps) if int(os.environ.get("RANK", "0")) == 0 else None
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    if under_launcher():
        bind_to_parent()
    with nullcontext() if alone else process_group(device=config.device or "cpu"):
        try:
            record = RankTraining(config).run(console)
        finally:
            if console is not None:
                console.finish()
        if console is not None:
            write_report(record, config, console)
        if not alone:
            dist.barrier()


class RankTraining:
    """The training of one rank. ``losses`` (nats per byte, over all micro-batches) has an entry for each step of the
    run, and ``step_ms`` for each that was taken here, not before a checkpoint. All ranks must make every call."""

    def __init__(self, config: TrainConfig) -> None:
        """Read the text, and build the model and the optimizer."""
        self.losses: list[float] = []
        self.step_ms: list[float] = []
        self._config, self._device = config, config.device or "cpu"
        self._corpus = load_corpus(config.data, config.sequence)
        self._model = build_model(config.preset, config.sequence, config.seed).to(self._device)
        self._optimizer = make_optimizer(config, self._model)
        self._optimizer.divisor = config.micro_batches
        self._scaler = GradScaler(self._device, enabled=config.mixed_precision == PRECISIONS["fp16"])
        self._scaler.scale(torch.zeros(1, device=self._device))  # a rank without a micro-batch scales nothing else
        self._begun, self._sent = time.perf_counter(), self._optimizer.traffic  # before the step under way
        self._held = self._optimizer.describe()  # after its backwards

    def run(self, console: Console | None) -> dict[str, Any]:
        """Train, validate, and close the optimizer. Return the content of run.json."""
        config, optimizer = self._config, self._optimizer
        check_same_text(optimizer, self._corpus.sha256)
        with saving(config, optimizer, self._corpus.sha256) as saves:
            facts = self._take_steps(saves, console)
            ranks = [json.loads(data) for data in optimizer.exchange(json.dumps(facts).encode())]
            windows = self._corpus.validation_batches(config.batch, config.sequence, VALIDATION_WINDOWS)
            mine = windows[optimizer.rank :: optimizer.world_size]
            validation = evaluate(self._model, optimizer, self._loss_of, mine)
        description, rounds = optimizer.describe(), math.ceil(config.micro_batches / optimizer.world_size)
        optimizer.close()
        return {
            "world_size": len(ranks),
            "stage": config.stage,
            "steps": config.steps,
            "micro_batches": config.micro_batches,
            "parameters": sum(parameter.numel() for parameter in self._model.parameters()),
            "loss_unit": "nats per byte",
            "losses": self.losses,
            "validation_loss": validation,
            "params_sha256": parameters_sha256(self._model),
            "step_ms_median": float(np.median(self.step_ms)) if self.step_ms else None,
            "bytes_per_rank": ranks[0]["measured"],
            "formula_bytes_per_rank": ranks[0]["formula"],
            "formula_bytes_by_stage": self._by_stage(len(ranks)),
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
        config, optimizer, ranks = self._config, self._optimizer, self._optimizer.world_size
        if saves is not None:
            self.losses += saves.resume(self._scaler)
        if console is not None and self.losses:
            console.line(f"goes on from step {len(self.losses)} on {counted(ranks, 'rank')}")
        self._sent = optimizer.traffic
        facts = self._facts()
        join = optimizer.join if self._takes_turns() else nullcontext
        micro_batches = self._micro_batches(len(self.losses))
        steps = train_steps(optimizer, self._loss_of, micro_batches, config.clip, self._scaler, join)
        for step, losses in enumerate(steps, len(self.losses) + 1):
            self.step_ms.append(1000 * (time.perf_counter() - self._begun))
            if step == config.steps:
                facts = self._facts()
            self.losses.append(mean_over_ranks(optimizer, losses))
            if console is not None:
                console.advance(step, f"loss {self.losses[-1]:.3f}")
            if saves is not None:
                saves.after_step(self.losses, self._scaler)
        return facts

    def _loss_of(self, batch: Batch) -> Tensor:
        return loss_fn(self._model(batch[0].to(self._device)), batch[1].to(self._device))

    def _micro_batches(self, begin: int) -> Iterator[Iterator[Batch]]:
        """Yield this rank's micro-batches of each step, and note what was so before it."""
        config, optimizer = self._config, self._optimizer
        for step in range(begin, config.steps):
            if step + 1 == config.steps:  # on a GPU gradients are gone after it
                optimizer.register_step_pre_hook(self._note_held)
            self._begun, self._sent = time.perf_counter(), optimizer.traffic
            mine = range(optimizer.rank, config.micro_batches, optimizer.world_size)
            yield (self._corpus.micro_batch(config.seed, step, j, config.batch, config.sequence) for j in mine)

    def _note_held(self, *_: Any) -> None:
        self._held = self._optimizer.describe()

    def _takes_turns(self) -> bool:
        """Return whether a rank that has fewer micro-batches than others must take its turns in the backwards.

        It does so by itself in clip and step, but at stage 3 others may gather units in their last forward, and a
        scaler, which comes before, fails on a rank without a gradient.
        """
        uneven = self._config.micro_batches % self._optimizer.world_size != 0
        return uneven and (self._config.row.parameters is Placement.SHARD or self._scaler.is_enabled())

    def _facts(self) -> dict[str, Any]:
        """Return what this rank held and sent in the last step, in bytes: its entry of ``ranks`` in run.json. States
        exist, and peaks are final, after the update."""
        now, sent = self._optimizer.describe(), self._optimizer.traffic
        held = {kind: self._held.bytes[kind] for kind in ("parameters", "gradients")}
        return {
            "rank": self._optimizer.rank,
            "measured": {**now.bytes, **held},
            "formula": now.formula_bytes,
            "payload_sent": sent.payload_sent - self._sent.payload_sent,
            "control_sent": sent.control_sent - self._sent.control_sent,
        }

    def _by_stage(self, ranks: int) -> dict[str, dict[str, int]]:
        """Return what the plain loop holds, and rank 0 at each stage, by formulas. The optimizer must be closed."""
        config = self._config
        found = bytes_by_stage(
            model_of(self._model, config.preset),
            classes_of(config),
            arguments_of(config),
            ranks,
            config.sharding_factor,
            fused=config.fused,
            device=self._device,
            mixed_precision=config.mixed_precision,
            offload=config.offload,
            rounding=config.rounding,
            bucket_cap_mb=None if config.bucket_cap_mb == "auto" else config.bucket_cap_mb,
        )
        return {name: {kind: getattr(held, kind) for kind in HELD} for name, held in found.items()}


def check_same_text(optimizer: ZeroOptimizer, sha256: str) -> None:
    """Raise `ValueError` on every rank if ranks read other text. All ranks; ``sha256``: of the text."""
    digests = [data.decode() for data in optimizer.exchange(sha256.encode())]
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise ValueError(
                f"rank {rank} reads other text than rank 0 (SHA-256 {digest[:12]} and {digests[0][:12]}): give every "
                "host the same files with --data"
            )


if __name__ == "__main__":
    sys.exit(run_rank(lambda settings: work(from_flags(TrainConfig, settings))))
