"""The optimizer of `zero train`: the classes of torch.optim by name, and which parameters Muon gets.

Knows: the flags that decide it. Does not know: data, ranks, steps.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...optimizer import ZeroOptimizer
from ..flags import option_of
from .settings import TrainConfig

MUON = "muon"  # the one optimizer of two classes


def make_optimizer(config: TrainConfig, model: nn.Module, *, alone: bool = False) -> ZeroOptimizer:
    """Build the optimizer of a configuration. ``alone``: for one rank without a group."""
    options = replace(config, sharding_factor=None, reshard_after_forward=True) if alone else config
    return ZeroOptimizer(
        _param_groups(config, model),
        classes_of(config)[0],
        module=model,
        **options.arguments(),
        **arguments_of(config),
    )


def classes_of(config: TrainConfig) -> list[type[Optimizer]]:
    """Return the class of all parameters, or for Muon that of the rest and that of the blocks' matrices. Raises
    ValueError, naming the flag, if a class has no argument of that name."""
    is_muon = config.optimizer.lower() == MUON
    classes = [torch.optim.AdamW, torch.optim.Muon] if is_muon else [_class(config.optimizer)]
    for optimizer_class in classes:
        known = inspect.signature(optimizer_class).parameters
        for name in arguments_of(config):
            if name not in known:
                raise ValueError(
                    f"{option_of(name)}: torch.optim.{optimizer_class.__name__} has no such argument. Omit it, or take "
                    "another --optimizer"
                )
    return classes


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
    return [{"params": matrices, **muon, **arguments_of(config)}, {"params": rest}]


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


def arguments_of(config: TrainConfig) -> dict[str, Any]:
    """Return the arguments of the classes."""
    arguments: dict[str, Any] = {"lr": config.lr}
    if config.weight_decay is not None:
        arguments["weight_decay"] = config.weight_decay
    if config.fused:
        arguments["fused"] = True
    return arguments
