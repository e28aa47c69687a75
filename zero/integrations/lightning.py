"""A strategy for Lightning's Trainer: ``Trainer(strategy=ZeroStrategy(stage=3))``.

Knows: what the Trainer asks of a strategy, and which of its arguments are obeyed. Does not know: how to train.
Needs pytorch-lightning or lightning.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ..data import MicroBatchSampler
from ..optimizer import ZeroOptimizer
from ..parameters.module_hooks import register_forward_method
from .conversion import OR_IGNORE, Conversions, gathered, held_in, hold, release
from .fabric import check_precision, imported, strategy_arguments

if TYPE_CHECKING:
    from pytorch_lightning import Trainer
    from pytorch_lightning import callbacks as _callbacks
    from pytorch_lightning.strategies import DDPStrategy, Strategy
else:
    _package = imported("lightning.pytorch", "pytorch_lightning")
    _callbacks = _package.callbacks
    DDPStrategy, Strategy = _package.strategies.DDPStrategy, _package.strategies.Strategy

_AVERAGE = "keep a zero.ShardedAverage of trainer.optimizers[0], updated by a callback of your own"
_REFUSED_CALLBACKS = {  # each reads, writes or replaces parameters, of which a rank may hold a part
    "WeightAveraging": _AVERAGE,
    "StochasticWeightAveraging": _AVERAGE,
    "ModelPruning": "prune the module before fit, or after trainer.optimizers[0].close()",
    "BatchSizeFinder": "it changes the micro-batches: find the size with one process and another strategy",
    "LearningRateFinder": "find the rate with one process and another strategy",
}
"""Callbacks of Lightning that cannot be obeyed, and what to do instead."""

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class ZeroStrategy(DDPStrategy):
    """Train a `LightningModule`, as it is, with a `ZeroOptimizer` of the class and options that it configures.

    `configure_optimizers` returns a plain optimizer, with schedulers if any, or a `ZeroOptimizer` if this strategy gets
    no options. Its parameters belong to the module; there is one optimizer. The parameters have the bits of the plain
    loop over the same micro-batches. A checkpoint is Lightning's, with the plain ``state_dict`` and the plain
    optimizer's states, and can be resumed at another stage and number of ranks.

    After `fit` the module stays sharded, so that `validate` and `save_checkpoint` go on from it;
    ``trainer.optimizers[0].close()``, called by all ranks, makes it plain.

    Args:
        arguments: options of `ZeroOptimizer` (``stage``, ``bucket_cap_mb``, ``mixed_precision``, ...), and arguments of
            Lightning's ``DDPStrategy`` that are not those of ``DistributedDataParallel`` (``timeout``, ...).

    Raises:
        TypeError: an argument is neither.
        ValueError: when a fit begins, on every rank: the `Trainer` has ``sync_batchnorm``, a gradient clip by value,
            a precision that replaces modules or a callback that handles parameters itself, or the module configures no
            or several optimizers.
    """

    strategy_name = "zero"

    def __init__(self, **arguments: Any) -> None:
        options, others = strategy_arguments(type(self), arguments)
        super().__init__(**others)
        remedy = "list it in the optimizer of configure_optimizers"
        self._conversions = Conversions(options, "ZeroStrategy", remedy + OR_IGNORE)

    def setup(self, trainer: Trainer) -> None:
        """Place the module and, for a fit, build its optimizer. All ranks."""
        module: Any = self.lightning_module
        if trainer.state.fn == "fit":
            self._check(trainer)
            self._conversions.close()
            release(module)  # of another trainer
        elif held := held_in(module):
            self._conversions.adopt(module, held[0])  # perhaps that of another trainer
        else:
            self._conversions.forget()
            return super().setup(trainer)  # a plain module, with rank 0's values
        Strategy.setup(self, trainer)  # without DDPStrategy's, which would wrap the module
        self.precision_plugin.clip_grad_by_norm = ZeroOptimizer.clip_grad_norm_  # type: ignore[method-assign, assignment]
        self.precision_plugin.clip_grad_by_value = _refuse_value  # type: ignore[method-assign, assignment]
        return None

    def _check(self, trainer: Trainer) -> None:
        if self._layer_sync is not None:  # private: the strategy is not told of `sync_batchnorm` otherwise
            raise ValueError(
                "ZeroStrategy does not take sync_batchnorm: statistics over all ranks are none of the plain loop's, "
                "which sees one micro-batch at a time"
            )
        if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
            _refuse_value()
        check_precision(type(self), self.precision_plugin)
        for name, remedy in _REFUSED_CALLBACKS.items():
            refused = getattr(_callbacks, name, ())  # a release may not have it
            if found := [each for each in trainer.callbacks if isinstance(each, refused)]:  # type: ignore[attr-defined]
                raise ValueError(f"ZeroStrategy does not take the callback {type(found[0]).__name__}: {remedy}")

    def _setup_model(self, model: Any) -> Any:  # private: Strategy.setup calls it
        return model

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Build the `ZeroOptimizer` of the module's optimizer. All ranks."""
        super().setup_optimizers(trainer)
        module: Any = self.lightning_module
        if len(self.optimizers) != 1:
            raise ValueError(
                f"ZeroStrategy takes one optimizer, not {len(self.optimizers)}: give one ZeroOptimizer param groups, "
                "each with an optimizer_class and options of its own"
            )
        self._conversions.add(module)
        plain = self.optimizers[0]
        self.optimizers = [optimizer := self._conversions.convert(plain)]
        if optimizer is not plain:
            vars(optimizer)["optimizer"] = plain  # where callbacks look for the optimizer of schedulers, and its class
        hold(module, optimizer)
        optimizer._engine.parts.cast_inside()  # the steps call parts of the module, not its forward
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, _callbacks.BaseFinetuning):
                _check_groups(callback, optimizer)
                callback.finetune_function = partial(_finetune, callback)  # type: ignore[method-assign]
        for name in _STEPS:
            if module.automatic_optimization or name != "training_step":  # else the optimizer steps inside of it
                register_forward_method(module, name)  # it may use weights itself, outside of a forward

    def process_dataloader(self, dataloader: object) -> object:
        """Return the loader as it is. Local. Lightning sets the epoch of ``loader.batch_sampler.sampler`` alone."""
        sampler = getattr(dataloader, "batch_sampler", None)
        if isinstance(sampler, MicroBatchSampler):
            sampler.sampler = sampler  # type: ignore[attr-defined]
        return dataloader

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the whole state of the module on rank 0, on the CPU, and {} on other ranks. All ranks."""
        module: Any = self.lightning_module
        return self._conversions.state_dict(module)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load a checkpoint's weights, also into a module that is sharded. All ranks."""
        with gathered(self._conversions.optimizers_of(self.lightning_module), write=True):
            super().load_model_state_dict(checkpoint, strict)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the plain optimizer's dict on rank 0, and {} on other ranks. All ranks."""
        found, plain = super().optimizer_state(optimizer), vars(optimizer).get("optimizer")
        if plain is not None and "param_names" not in plain.param_groups[0]:
            for group in found.get("param_groups", ()):  # a plain optimizer that loads names takes no group without
                group.pop("param_names", None)
        return found

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load a checkpoint's states. All ranks."""
        for optimizer, states in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(states)  # each rank keeps its part, on the device where it belongs

    def teardown(self) -> None:
        """Leave Lightning's plugins. A sharded module stays as it is, where Lightning would move it to the CPU."""
        if not self._conversions.optimizers:
            return super().teardown()
        for plugin in (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io):
            if plugin is not None:
                plugin.teardown()
        return None


def _check_groups(callback: Any, optimizer: ZeroOptimizer) -> None:
    """Raise `ValueError` if a checkpoint has further param groups, and keep a callback from replacing the groups."""
    # Private: the callback names its groups nowhere else. The optimizer loads their options itself.
    if callback._restarting and len(callback._internal_optimizer_metadata.get(0, ())) > len(optimizer.param_groups):
        raise ValueError(
            f"ZeroStrategy: the checkpoint has param groups that {type(callback).__name__} has added: resume from one "
            "that was saved before the unfreezing"
        )
    callback._restarting = False


def _finetune(callback: Any, module: Any, epoch: int, optimizer: Any) -> None:
    """Call the callback's own ``finetune_function``, which compares the values of parameters. All ranks."""
    if not isinstance(optimizer, ZeroOptimizer):  # of another strategy's fit
        return type(callback).finetune_function(callback, module, epoch, optimizer)  # type: ignore[no-any-return]

    def add_param_group(group: dict[str, Any]) -> None:
        whole.close()
        ZeroOptimizer.add_param_group(optimizer, group)
        whole.enter_context(optimizer.gathered())

    with ExitStack() as whole:
        whole.enter_context(optimizer.gathered())
        vars(optimizer)["add_param_group"] = add_param_group
        try:
            type(callback).finetune_function(callback, module, epoch, optimizer)
        finally:
            del optimizer.add_param_group
    return None


def _refuse_value(*_: torch.optim.Optimizer | float) -> NoReturn:
    raise ValueError("ZeroStrategy clips by norm, not by value: leave gradient_clip_algorithm out, or set it to 'norm'")
