"""ZeRO for PyTorch in which the number of ranks does not change the result.

`ZeroOptimizer` shards a torch.optim class over the ranks of a process group, `MicroBatchSampler` deals the data to
them, and `CheckpointManager` saves what any number of ranks can restore.
"""

# The names live in `public`. It is imported, and torch with it, when one of them is first used: Python imports this
# package before `zero.commands`, and `zero --help` needs no torch.

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .public import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        public = importlib.import_module(".public", __name__)
        globals().update({each: getattr(public, each) for each in ("__all__", *public.__all__)})
        if name not in globals():  # the import may have added a module of this name
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
