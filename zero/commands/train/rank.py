"""One rank of `zero train`: the plain training loop of a byte-level GPT, with ZeroOptimizer for torch's optimizer.

Knows: the order group - corpus - model - optimizer - loop - validation - report. Does not know: how ranks are started.

    micro-batch j of the M of a global step goes to rank j mod W and is the same data for every W;
    the summed gradient is divided by M. If W does not divide M, the last of the ceil(M / W) rounds of a step has
    fewer micro-batches than ranks.
"""

from __future__ import annotations

import inspect
import math
import os
import sys
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ... import MixedPrecision, Offload, ZeroOptimizer
from ...runtime.process_group import bind_to_parent, under_launcher
from ..console import Console
from ..runner import barrier, process_group, run_rank
from .data import Corpus, load_corpus
from .loop import Loop, validate
from .memory_stats import parameters_sha256
from .model import GPT, build_model, generate
from .report import RankFacts, RunRecord, write_report
from .saves import Saves
from .settings import TrainConfig

__all__ = ["main", "make_optimizer", "optimizer_arguments", "work"]

SAMPLE_PROMPT, SAMPLE_LENGTH = 48, 300
VALIDATION_WINDOWS = 256
MUON = "muon"  # the one optimizer of two classes
_PRECISIONS = {"fp32": None, "bf16": MixedPrecision(torch.bfloat16), "fp16": MixedPrecision(torch.float16)}


def work(config: TrainConfig) -> None:
    """Train as one rank. Rank 0 writes the report. All ranks end together, so that a launcher that restarts ranks
    starts them all if one fails at the end. Raises if the last save has failed."""
    torch.set_num_threads(config.threads)
    console = Console(config.steps) if int(os.environ.get("RANK", "0")) == 0 else None
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    if under_launcher():
        bind_to_parent()
    with nullcontext() if alone else process_group():
        try:
            record = _train(config, console)
        finally:
            if console is not None:
                console.finish()
        if console is not None:
            write_report(record, console)
        if not alone:
            barrier()
    if record.unsaved is not None:
        raise RuntimeError(record.unsaved)


def _train(config: TrainConfig, console: Console | None) -> RunRecord:
    """Train, validate, and close the optimizer. The record is the same on every rank, but for the sample."""
    corpus = load_corpus(config.data, config.sequence)
    model = build_model(config.preset, config.sequence, config.seed)
    optimizer = make_optimizer(config, model)
    _agree_on_text(optimizer, corpus)
    with Saves(config, optimizer, corpus.sha256) as saves:
        loop = Loop(config, corpus, model, optimizer, console, saves)
        facts = loop.run()
        batches = corpus.validation_batches(config.batch, config.sequence, VALIDATION_WINDOWS)
        bits_per_byte = validate(model, optimizer, batches)
        ranks = [RankFacts.from_bytes(data) for data in optimizer.exchange(facts.to_bytes())]
    description = optimizer.describe()
    rounds = math.ceil(config.micro_batches / optimizer.world_size)
    optimizer.close()
    return RunRecord(
        config=config,
        collective=description.collective,
        corpus=corpus.summary(),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        losses=loop.losses,
        validation_bits_per_byte=bits_per_byte,
        params_sha256=parameters_sha256(model),
        step_ms=loop.step_ms,
        checkpoints=saves.records(),
        unsaved=saves.unsaved,
        ranks=ranks,
        formula_traffic=description.formula_traffic_bytes(rounds, rounds),
        sample=_sample(model, corpus, config.seed) if console is not None else "",
    )


def _agree_on_text(optimizer: ZeroOptimizer, corpus: Corpus) -> None:
    """Raise ValueError if ranks on different hosts read different text: their micro-batches form no global batch."""
    digests = [data.decode() for data in optimizer.exchange(corpus.sha256.encode())]
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise ValueError(
                f"rank {rank} reads other text than rank 0 (SHA-256 {digest[:12]} and {digests[0][:12]}): give every "
                "host the same files with --data"
            )


def _sample(model: GPT, corpus: Corpus, seed: int) -> str:
    """Return the beginning of the validation text and its continuation by the model, safe to print."""
    prompt = bytes(corpus.validation[:SAMPLE_PROMPT].tolist())
    text = (prompt + generate(model, prompt, SAMPLE_LENGTH, seed)).decode(errors="replace").replace("\ufffd", "·")
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "·" for letter in text)


def make_optimizer(config: TrainConfig, model: nn.Module, *, alone: bool = False) -> ZeroOptimizer:
    """Build the optimizer of a configuration. ``alone``: for one rank without a group."""
    return ZeroOptimizer(
        _param_groups(config, model),
        _optimizer_class(config.optimizer),
        module=model,
        stage=config.stage,
        bucket_cap_mb=config.bucket_cap,
        collective=config.collective,
        sharding_factor=None if alone else config.sharding_factor,
        reshard_after_forward=True if alone else config.reshard,
        offload=None if config.offload is None else Offload(config.offload),
        mixed_precision=_PRECISIONS[config.precision],
        **optimizer_arguments(config),
    )


def _param_groups(config: TrainConfig, model: nn.Module) -> nn.Module | list[dict[str, Any]]:
    """Return what the optimizer updates: the model, or for Muon the matrices of the blocks, and the rest for AdamW.

    Muon's updates are scaled to the size of AdamW's, so that one learning rate does for both (Liu et al., "Muon is
    Scalable for LLM Training", 2025, section 2.2).
    """
    if config.optimizer.lower() != MUON:
        return model
    named = list(model.named_parameters())
    matrices = [(name, p) for name, p in named if name.startswith("blocks.") and p.dim() == 2]
    rest = [(name, p) for name, p in named if not (name.startswith("blocks.") and p.dim() == 2)]
    muon = {"optimizer_class": torch.optim.Muon, "partition": "parameter", "adjust_lr_fn": "match_rms_adamw"}
    return [{"params": matrices, **muon, **optimizer_arguments(config)}, {"params": rest}]


def _optimizer_class(name: str) -> type[Optimizer]:
    """The class of torch.optim with this name in lower case; with Muon, that of the parameters that are no matrices."""
    if name.lower() == MUON:
        return torch.optim.AdamW
    found: dict[str, type[Optimizer]] = {
        item.__name__.lower(): item
        for item in vars(torch.optim).values()
        if isinstance(item, type) and issubclass(item, Optimizer) and item is not Optimizer
    }
    if name.lower() not in found:
        raise ValueError(f"--optimizer {name}: torch.optim has no such class. It has {', '.join(sorted(found))}")
    return found[name.lower()]


def optimizer_arguments(config: TrainConfig) -> dict[str, Any]:
    """Return the arguments of the optimizer class. Raises ValueError if the class does not take one of the flags."""
    of_muon = config.optimizer.lower() == MUON
    accepted = inspect.signature(torch.optim.Muon if of_muon else _optimizer_class(config.optimizer)).parameters
    arguments: dict[str, Any] = {"lr": config.lr}
    if config.weight_decay is not None:
        arguments["weight_decay"] = config.weight_decay
    if config.fused:
        arguments["fused"] = True
    for name in arguments:
        if name not in accepted:
            flag = name.replace("_", "-")
            raise ValueError(f"--optimizer {config.optimizer} takes no --{flag}: leave it out, or use adamw")
    return arguments


def main() -> int:
    """Run a rank that `zero train` started, and return its exit code."""
    return run_rank(lambda settings: work(TrainConfig.from_json(settings)))


if __name__ == "__main__":
    sys.exit(main())
