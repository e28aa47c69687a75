"""Checkpoints whose bytes do not depend on the ranks that wrote them.

`zero` has the functions and `zero.CheckpointManager`; here are the classes of their results.
"""

from __future__ import annotations

from .read.reader import Checkpoint
from .read.restorer import Restored
from .write.save_thread import Saving

__all__ = ["Checkpoint", "Restored", "Saving"]
