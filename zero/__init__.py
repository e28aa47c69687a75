"""A ZeRO optimizer for PyTorch whose results are those of the plain loop, bit for bit."""

from __future__ import annotations

from .commands.verify.verification import Verification, verify
from .config import MixedPrecision, Offload
from .optimizer import ZeroOptimizer
from .parameters.module_hooks import register_forward_method
from .step.clip import clip_grad_norm_

__all__ = [
    "MixedPrecision",
    "Offload",
    "Verification",
    "ZeroOptimizer",
    "clip_grad_norm_",
    "register_forward_method",
    "verify",
]
__version__ = "0.1.0"
