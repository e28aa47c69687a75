"""The inputs of `zero plan`: a training, a cluster and its hardware, made of flags.

Knows: the four sources of a model, and what their work is counted from. Does not know: settings, seconds, output.
Every error is a `ValueError` of one line that names the flag or the file.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...core.stage import STAGES, check_prefetch_depth
from ...parameters.casting import put_casts
from ...planning.hardware import Cluster, Hardware, presets, read_hardware
from ...planning.model import Model, UnitWork
from ...planning.models.parameter_lists import of_parameter_list
from ...planning.models.shapes import model_of, of_config
from ...planning.models.works import count_module, count_transformer, products_in_fp32
from ...planning.plan import Training
from ...planning.setting import OPTIMIZERS
from ...precision import Precisions, named_precision, param_dtype_of
from ..train.model import GPT, PRESETS, loss_fn
from .settings import PlanConfig

SOURCES = ("config", "parameters", "module", "preset")


@dataclass(frozen=True)
class Asked:
    """What a plan is made for."""

    training: Training
    cluster: Cluster
    hardware: Hardware


def asked_of(config: PlanConfig) -> Asked:
    """Return the inputs of a plan. Raises `ValueError` for wrong ones."""
    hardware = presets() if config.hardware is None else read_hardware(config.hardware)
    cluster = hardware.cluster(config.cluster, nic=config.nic, fabric=config.fabric)
    for name in ("tokens", "price"):
        value = getattr(config, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"--{name} is {value}: it must be a number above 0")
    if config.optimizer not in OPTIMIZERS:
        raise ValueError(f"--optimizer is {config.optimizer!r}: choose one of {', '.join(OPTIMIZERS)}")
    cluster.gpu.peak(str(_param_dtype(config)).removeprefix("torch."))
    training = training_of(config)
    training.micro_batches(cluster.ranks)
    return Asked(training, cluster, hardware)


def training_of(config: PlanConfig) -> Training:
    """Return the training that the flags describe."""
    given = [name for name in SOURCES if getattr(config, name) is not None]
    if len(given) != 1:
        found = "none" if not given else " and ".join(f"--{name}" for name in given)
        raise ValueError(f"the model needs exactly one of {', '.join(f'--{name}' for name in SOURCES)}, here {found}")
    check_prefetch_depth(config.prefetch_depth, STAGES[3])
    if config.micro < 1 or config.sequence < 1:
        raise ValueError(f"--micro {config.micro} and --sequence {config.sequence} must both be at least 1")
    try:
        model, works = _counted(config)
    except (ArithmeticError, RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"the model cannot be counted: {type(error).__name__}: {reason}") from error
    tokens, patterns = config.micro * config.sequence, _fp32_modules(config)
    counted = works or [UnitWork(matmul_flops=2.0 * numel * tokens) for numel in model.unit_numels()]
    if patterns and config.module is None and config.preset is None:
        counted = products_in_fp32(model, counted, model.dtypes(named_precision(config.precision, patterns)), tokens)
    return Training(
        model,
        counted,
        config.micro,
        config.sequence,
        config.global_batch,
        config.recompute,
        config.precision,
        config.optimizer,
        counts_activations=bool(works),
        fp32_modules=patterns,
        prefetch_depth=config.prefetch_depth,
    )


def _fp32_modules(config: PlanConfig) -> tuple[str, ...]:
    """Return the patterns of the modules that compute in fp32."""
    if config.fp32_modules is None:
        return ()
    if config.precision == "fp32":
        raise ValueError("--fp32-modules: with --precision fp32 every module computes in fp32, so leave it out")
    patterns = tuple(config.fp32_modules.split(","))
    if "" in patterns:  # which would match the outermost module, and so all of them
        raise ValueError(f"--fp32-modules is {config.fp32_modules!r}, of which a pattern is empty")
    return patterns


def _narrowed(config: PlanConfig, module: nn.Module) -> nn.Module:
    """Return a module whose parts compute in the dtypes of the training."""
    module, patterns = module.to(_param_dtype(config)), _fp32_modules(config)
    if patterns:
        precisions = Precisions(named_precision(config.precision, patterns), module)
        for parameter in module.parameters():
            if precisions.of(parameter).param_dtype is torch.float32:
                parameter.data = parameter.detach().float()
        for border in precisions.borders:
            put_casts(border, None)
    return module


def _param_dtype(config: PlanConfig) -> torch.dtype:
    return param_dtype_of(config.precision)


def _counted(config: PlanConfig) -> tuple[Model, Sequence[UnitWork] | None]:
    """Return a model and the work of its units; None if nothing says what it computes."""
    dtype = _param_dtype(config)
    if config.config is not None:
        model = of_config(config.config)
        return model, count_transformer(model, config.micro, config.sequence, dtype)
    if config.parameters is not None:
        return of_parameter_list(config.parameters), None
    if config.preset is not None:
        if config.recompute != "none":
            raise ValueError("--recompute: the models of zero train recompute nothing, so leave it out with --preset")
        return _preset(config)
    module, loss = _made(str(config.module))
    model = model_of(module, str(config.module))
    return model, None if loss is None else count_module(
        _narrowed(config, module), lambda module: _on_meta(loss, module)
    )


def _preset(config: PlanConfig) -> tuple[Model, Sequence[UnitWork]]:
    shape = PRESETS[cast(str, config.preset)]
    with torch.device("meta"):
        module = _narrowed(config, GPT(shape, config.sequence))
        tokens = torch.empty(config.micro, config.sequence, dtype=torch.int64)
    model = replace(model_of(module, f"zero train's {config.preset}"), hidden=shape.width, vocabulary=shape.vocabulary)
    return model, count_module(module, lambda gpt: loss_fn(gpt(tokens), tokens))


def _made(text: str) -> tuple[nn.Module, Callable[[nn.Module], Tensor] | None]:
    """Return what ``PKG:CALLABLE`` makes."""
    name, _, attribute = text.partition(":")
    if not (name and attribute):
        raise ValueError(f"--module {text!r} must be PKG:CALLABLE, as in --module my_model:build")
    sys.path.insert(0, str(Path.cwd()))
    try:
        with torch.device("meta"):
            made: Any = getattr(importlib.import_module(name), attribute)()
    except Exception as error:
        raise ValueError(f"--module {text}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)
    module, loss = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module) or not (loss is None or callable(loss)):
        raise ValueError(
            f"--module {text} returned {type(made).__name__}: it must return a module, or a module and a function of it"
        )
    return module, loss


def _on_meta(loss: Callable[[nn.Module], Tensor], module: nn.Module) -> Tensor:
    with torch.device("meta"):
        return loss(module)
