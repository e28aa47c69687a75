"""A strategy for Lightning Fabric: ``Fabric(strategy=ZeroFabricStrategy(stage=3))``.

Also what the strategy for Lightning's Trainer shares with it: which packages, arguments and precisions they take.

Knows: what Fabric asks of a strategy. Does not know: how to train. Needs lightning-fabric or lightning.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer

from ..optimizer import ZeroOptimizer
from .conversion import OR_IGNORE, Conversions, gathered, split

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


if TYPE_CHECKING:
    from lightning_fabric.strategies.ddp import DDPStrategy
else:
    DDPStrategy = imported("lightning.fabric", "lightning_fabric").strategies.DDPStrategy


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


class ZeroFabricStrategy(DDPStrategy):
    """Train a module with a `ZeroOptimizer` of the class and options of the optimizer that ``fabric.setup`` gets.

    ``model, optimizer = fabric.setup(model, optimizer)`` takes a plain optimizer, or a `ZeroOptimizer` if this strategy
    gets no options. The `ZeroOptimizer` itself is then ``optimizer.optimizer``. The parameters have the bits of the
    plain loop over the same micro-batches. `fabric.save` writes, on rank 0, the plain ``state_dict`` and the plain
    optimizer's states, which `fabric.load` reads at any stage and number of ranks.

    Inside `fabric.no_backward_sync` gradients are reduced, too: so they are added up in the plain loop's order.

    Args:
        arguments: options of `ZeroOptimizer` (``stage``, ``bucket_cap_mb``, ``mixed_precision``, ...), and arguments of
            Lightning's ``DDPStrategy`` that are not those of ``DistributedDataParallel`` (``timeout``, ...).

    Raises:
        TypeError: an argument is neither.
        ValueError: at ``setup``, on every rank: the precision replaces modules, or no module has the parameters. At
            ``clip_gradients``: the clip is by value.
    """

    def __init__(self, **arguments: Any) -> None:
        options, others = strategy_arguments(type(self), arguments)
        super().__init__(**others)
        remedy = "set up the optimizer that has it, as in `optimizer = fabric.setup_optimizers(optimizer)`"
        self._conversions = Conversions(options, "ZeroFabricStrategy", remedy + OR_IGNORE)
        # Private: of this, and of no method of the strategy, Fabric asks a context without reductions.
        self._backward_sync_control: Any = SimpleNamespace(no_backward_sync=lambda module, enabled: nullcontext())

    def setup_module(self, module: nn.Module) -> Any:
        """Return the module as it is. Local. Its backwards raise `RuntimeError` until its optimizer is set up."""
        check_precision(type(self), self.precision)
        self._conversions.add(module)
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the `ZeroOptimizer` of ``optimizer``. All ranks."""
        return self._conversions.convert(optimizer)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip all gradients of ``optimizer``, and return their norm. All ranks."""
        if not isinstance(optimizer, ZeroOptimizer):
            raise TypeError(
                f"ZeroFabricStrategy clips the optimizers that fabric.setup returned, not {optimizer!r:.80}"
            )
        self.precision.unscale_gradients(optimizer)
        return optimizer.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> NoReturn:
        """Raise `ValueError`."""
        raise ValueError(
            "ZeroFabricStrategy clips by norm, not by value: give clip_gradients max_norm instead of clip_val"
        )

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the whole state of the module on rank 0, on the CPU, and {} on other ranks. All ranks."""
        return self._conversions.state_dict(module)

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load weights, also into a module that is sharded. All ranks."""
        with gathered(self._conversions.optimizers_of(module), write=True):
            super().load_module_state_dict(module, state_dict, strict)
