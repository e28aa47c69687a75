"""A strategy for Lightning Fabric: ``Fabric(strategy=ZeroFabricStrategy(stage=3))``.

Knows: what Fabric asks of a strategy. Does not know: how to train. Needs lightning-fabric or lightning.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer

from ..optimizer import ZeroOptimizer
from .conversion import OR_IGNORE, Conversions, gathered
from .lightning_common import check_precision, imported, strategy_arguments

if TYPE_CHECKING:
    from lightning_fabric.strategies.ddp import DDPStrategy
else:
    DDPStrategy = imported("lightning.fabric", "lightning_fabric").strategies.DDPStrategy


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
        self._backward_sync_control: Any = _EveryBackward()  # private: Fabric asks no method of the strategy

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


class _EveryBackward:
    """What Fabric asks for a context without reductions."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return nullcontext()
