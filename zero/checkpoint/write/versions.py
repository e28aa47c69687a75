"""The versions that write a checkpoint, for its manifest.

Knows: installed packages. Does not know: checkpoints.
"""

from __future__ import annotations

import importlib.metadata
import platform

import torch


def versions() -> dict[str, str]:
    """Return the versions of this library, of torch and of Python."""
    try:
        own = importlib.metadata.version("zero-optimizer")
    except importlib.metadata.PackageNotFoundError:
        own = "not installed"
    return {"zero-optimizer": own, "torch": torch.__version__, "python": platform.python_version()}
