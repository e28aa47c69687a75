"""A ZeRO optimizer for PyTorch whose results are those of the plain loop, bit for bit."""

from __future__ import annotations

from .clip import clip_grad_norm_
from .offload import Offload
from .optimizer import ZeroOptimizer
from .precision import MixedPrecision
from .unit_hooks import register_forward_method
from .verification import Verification, verify

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
