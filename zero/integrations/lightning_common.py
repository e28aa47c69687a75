"""What the strategies for Lightning's Trainer and for Fabric share: which packages, arguments and precisions they take.

Knows: names of Lightning. Imports none of its packages by itself.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from .conversion import split

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true")
"""The precisions that neither replace modules nor shard by themselves, and that were tried."""

_ARGUMENTS = frozenset(  # of DDPStrategy; its others are those of DistributedDataParallel, which is not used
    {
        "accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision", "precision_plugin",
        "process_group_backend", "timeout", "start_method",
    }
)  # fmt: skip


def imported(*names: str) -> ModuleType:
    """Return the first of these packages that is imported, or else the first one that is installed."""
    installed = [name for name in names if importlib.util.find_spec(name.partition(".")[0])]
    in_use = [name for name in installed if name in sys.modules]
    return importlib.import_module([*in_use, *installed, names[-1]][0])


def strategy_arguments(of: type, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of `ZeroOptimizer`, and the arguments of Lightning's DDPStrategy.

    Raises `TypeError` for arguments that are neither, which names the strategy's class ``of``.
    """
    options, others = split(given)
    if unknown := others.keys() - _ARGUMENTS:
        raise TypeError(
            f"{of.__name__} has no argument {', '.join(sorted(unknown))}: it takes the options of ZeroOptimizer, and "
            f"{', '.join(sorted(_ARGUMENTS))} of DDPStrategy"
        )
    return options, others


def check_precision(of: type, plugin: Any) -> None:
    """Raise `ValueError` if a precision plugin of Lightning is not one of `PRECISIONS`."""
    name = getattr(plugin, "precision", "32-true")
    if name not in PRECISIONS:
        raise ValueError(f"{of.__name__} does not take the precision {name!r}: it takes {', '.join(PRECISIONS)}")
