"""`ZeroTrainer`: the Trainer of transformers with a `ZeroOptimizer`. Needs transformers and accelerate.

Knows: which methods of Trainer and Accelerator build the optimizer, clip, save and load. Does not know: how a step is
taken. `trainer_arguments` has the arguments that are refused; `weights_of` and `init_of` are in `transformers_weights`.

A name that begins with an underscore is private there. So a release may change it; the comment beside each says why it
is needed.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer  # type: ignore[import-not-found, unused-ignore]

from ..config import ShardingOptions
from ..optimizer import ZeroOptimizer
from .trainer_arguments import check_accelerator, check_arguments, check_process, check_ranks, process_group_of
from .transformers_weights import init_of, weights_of

__all__ = ["ZeroConfig", "ZeroTrainer", "init_of", "weights_of"]


@dataclass(frozen=True, kw_only=True)
class ZeroConfig(ShardingOptions):
    """The arguments of the `ZeroOptimizer` that `ZeroTrainer` builds; that class describes each of them.

    They are checked here, as there. Those that Trainer has itself (the class, its arguments, the clip) are not among
    them; the divisor is the number of ranks, since Trainer multiplies a loss that it has divided by all tokens by it.

    Raises:
        TypeError, ValueError: an argument is invalid by itself; the message names it.
    """


class ZeroTrainer(Trainer):  # type: ignore[misc, unused-ignore]
    """A `transformers.Trainer` whose optimizer states, gradients and parameters are sharded over the ranks.

    The arguments are those of Trainer, and ``zero``. Start one process per rank, with torchrun; one process alone
    trains as Trainer does. The trained parameters are those of the loop that runs Trainer's micro-batches in turn in
    one process, bit for bit.

    `train`, `evaluate`, `predict`, `save_model` and `end` are calls of all ranks. A checkpoint is Trainer's own folder:
    the whole model, and the plain dict of the optimizer, which ``train(resume_from_checkpoint=...)`` loads at any stage
    and number of ranks. That dict is whole in rank 0's host memory during a save, and in every rank's during a load.

    Args:
        arguments, named: those of Trainer. ``optimizers`` is refused; ``optimizer_cls_and_kwargs`` may give the class.
        zero: how the optimizer is sharded. Default: ``ZeroConfig()``, stage 2.

    Raises:
        ValueError: an argument cannot be obeyed; the message names it, the reason and the remedy.
        TypeError: ``zero`` is not a `ZeroConfig`.
    """

    zero_optimizer: ZeroOptimizer | None = None
    """The optimizer, from the first `train` on; ``zero_optimizer.gathered()`` makes the parameters of stage 3 whole."""

    def __init__(self, *arguments: Any, zero: ZeroConfig | None = None, **named: Any) -> None:
        if not isinstance(zero, ZeroConfig | None):
            raise TypeError(f"zero must be a zero.integrations.transformers.ZeroConfig, not {zero!r}")
        self.zero = ZeroConfig() if zero is None else zero
        super().__init__(*arguments, **named)
        if self.optimizer is not None or self.lr_scheduler is not None:
            raise ValueError(
                "ZeroTrainer does not take optimizers=...: it builds the optimizer and its scheduler itself; name them "
                "by TrainingArguments(optim=..., lr_scheduler_type=...), or give the class by "
                "optimizer_cls_and_kwargs=(class, arguments)"
            )

    def create_accelerator_and_postprocess(self) -> None:
        """Check the arguments, and keep Accelerator from DistributedDataParallel. Trainer calls it."""
        check_arguments(self.args)
        check_process(self.args)
        super().create_accelerator_and_postprocess()
        found: Any = self.accelerator
        check_accelerator(found)
        prepare_model, prepare_optimizer = found.prepare_model, found.prepare_optimizer
        # Three public methods, replaced on this object. In its evaluation mode Accelerator does all but put
        # DistributedDataParallel around the model: autocast, compilation. The model is on its device, and has no
        # memory to be moved once it is sharded. To place an optimizer, Accelerator asks each rank for all states.
        found.prepare_model = lambda model, *_, **__: prepare_model(model, device_placement=False, evaluation_mode=True)
        found.prepare_optimizer = lambda optimizer, *_, **__: prepare_optimizer(optimizer, device_placement=False)
        found.clip_grad_norm_ = self._clip

    def _clip(self, _: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        assert self.zero_optimizer is not None, "Trainer clips after it has created the optimizer"
        return self.zero_optimizer.clip_grad_norm_(max_norm, norm_type)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Build the `ZeroOptimizer` of the arguments' class and param groups. All ranks. Trainer calls it."""
        check_ranks(self.args, self.train_dataset, "train_dataset")
        if self.optimizer is None:
            if self.zero_optimizer is not None:  # of the model before: `model_init` has built another one
                self.zero_optimizer.close()
            trained: Any = self.model
            chosen = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, trained)
            optimizer_class, defaults = chosen
            decayed = set(self.get_decay_parameter_names(trained))
            groups: list[dict[str, Any]] = [
                {"params": [], "weight_decay": weight_decay} for weight_decay in (self.args.weight_decay, 0.0)
            ]
            for name, parameter in trained.named_parameters():
                if parameter.requires_grad:
                    groups[name not in decayed]["params"].append((name, parameter))
            self.optimizer = self.zero_optimizer = ZeroOptimizer(
                groups,
                optimizer_class,
                module=trained,
                process_group=process_group_of(self.args),
                **self.zero.arguments(),
                **defaults,
            )
        return self.optimizer

    def _whole(self, write: bool = False) -> AbstractContextManager[None]:
        """Return a context in which the model's parameters are whole. All ranks. Before `train` they are."""
        if self.optimizer is None or self.zero_optimizer is None:
            return nullcontext()
        return self.zero_optimizer.gathered(write=write)

    def evaluation_loop(self, dataloader: Any, *arguments: Any, **named: Any) -> Any:
        """Evaluate or predict, as Trainer does. All ranks. `evaluate` and `predict` call it."""
        check_ranks(self.args, getattr(dataloader, "dataset", None), "evaluation dataset")
        return super().evaluation_loop(dataloader, *arguments, **named)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model, as Trainer does. All ranks; rank 0 writes."""
        with self._whole():
            super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the whole optimizer. Private: Trainer has no call before it reads ``state_dict()`` where it saves."""
        assert self.zero_optimizer is not None, "Trainer saves an optimizer that it has created"
        self.zero_optimizer.consolidate_state_dict(None if self.args.save_on_each_node else 0)
        super()._save_optimizer_and_scheduler(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the model. Private: at a second `train` it is sharded, and Trainer has no call around its loading."""
        with self._whole(write=True):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        """Load the best model into the sharded one. Private: Trainer has no call around it."""
        with self._whole(write=True):
            super()._load_best_model()

    def end(self) -> None:
        """Make the model plain again, and end as Trainer does: trackers and the process group. All ranks."""
        if self.zero_optimizer is not None:
            self.zero_optimizer.close()
        super().end()  # type: ignore[no-untyped-call, unused-ignore]
