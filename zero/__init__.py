"""A ZeRO optimizer for PyTorch whose results are those of the plain loop, bit for bit."""

from __future__ import annotations

from .clip import clip_grad_norm_
from .optimizer import ZeroOptimizer

__all__ = ["ZeroOptimizer", "clip_grad_norm_"]
__version__ = "0.1.0"
