"""The optimizer of `zero train`, made of its flags.

Knows: which class and which param groups a name of ``--optimizer`` means. Does not know: data, steps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ... import ZeroOptimizer
from .settings import TrainConfig

MUON = "muon"  # the one optimizer of two classes


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
