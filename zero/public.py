"""The public names of `zero`. The package imports this module when the first of them is used."""

from __future__ import annotations

from .checkpoint.manager import CheckpointManager
from .checkpoint.read.reader import CheckpointError, open_checkpoint
from .checkpoint.single import load, save
from .checkpoint.stop_request import StopOnSignal
from .commands.verify.verification import Verification, verify
from .config import Offload
from .core.rounding import StochasticRounding
from .data import MicroBatchSampler
from .optimizer import ZeroOptimizer
from .parameters.materialize import LazyStateDict
from .parameters.module_hooks import register_forward_method
from .precision import MixedPrecision
from .runtime.process_group import process_group
from .state.average import ShardedAverage
from .step.clip import clip_grad_norm_

__all__ = [
    "CheckpointError",
    "CheckpointManager",
    "LazyStateDict",
    "MicroBatchSampler",
    "MixedPrecision",
    "Offload",
    "ShardedAverage",
    "StochasticRounding",
    "StopOnSignal",
    "Verification",
    "ZeroOptimizer",
    "clip_grad_norm_",
    "load",
    "open_checkpoint",
    "process_group",
    "register_forward_method",
    "save",
    "verify",
]
