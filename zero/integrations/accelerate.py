"""An `Accelerator` of accelerate that trains with `ZeroOptimizer`: ``ZeroAccelerator(stage=3)``.

accelerate has no place for strategies of others, so this is a subclass. Knows: which parts of an `Accelerator` touch
gradients, and which arguments it obeys. Does not know: how to train.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from accelerate import Accelerator  # type: ignore[import-not-found, import-untyped, unused-ignore]
from accelerate.data_loader import prepare_data_loader  # type: ignore[import-not-found, import-untyped, unused-ignore]
from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-not-found, import-untyped, unused-ignore]
from accelerate.utils import DistributedType, DynamoBackend, is_compiled_module  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..data import MicroBatchSampler
from .conversion import OR_IGNORE, Conversions, check_started, gathered, split

_SHARDINGS = (
    "fsdp_plugin", "deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin", "torch_tp_plugin",
    "parallelism_config",
)  # fmt: skip
_KINDS = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class ZeroAccelerator(Accelerator):  # type: ignore[misc]
    """An `Accelerator` whose ``prepare`` leaves the model as it is, and makes a `ZeroOptimizer` of a plain optimizer.

    ``prepare(model, optimizer, loader, scheduler)`` and the loop stay as they are. The prepared optimizer wraps the
    `ZeroOptimizer`, which is its ``optimizer``. The parameters have the bits of the plain loop over the same
    micro-batches: a prepared loader gives batch j to rank j mod W, ``backward`` divides each loss by the accumulation
    steps, and the sum over the W ranks is divided by W. `save_state`, `save_model` and `get_state_dict` give rank 0 the
    plain ``state_dict`` and the plain optimizer's states; `load_state` reads them at any stage and number of ranks.

    Args:
        arguments: options of `ZeroOptimizer` (``stage``, ``bucket_cap_mb``, ...), and arguments of `Accelerator`.
            ``mixed_precision`` is accelerate's if it is a string, and `zero.MixedPrecision` otherwise. ``cpu`` is by
            default True where there is no GPU: accelerate would take each rank for the only one.

    Raises:
        ValueError: FSDP, DeepSpeed, Megatron-LM, tensor or context parallelism, dynamo, fp8, fp16 on CPUs, or arguments
            for DistributedDataParallel, asked for by an argument or by ``accelerate launch``; or accelerate has found
            fewer processes than were started.
    """

    def __init__(self, **arguments: Any) -> None:
        options, others = split(arguments)
        if found := [name for name in _SHARDINGS if others.get(name) is not None]:
            raise ValueError(f"ZeroAccelerator does not take {found[0]}: the ZeroOptimizer alone shards")
        others.setdefault("cpu", not torch.cuda.is_available())
        super().__init__(**others)
        self._check()
        remedy = "prepare the optimizer that has it, as in `optimizer = accelerator.prepare(optimizer)`"
        self._conversions = Conversions(options, "ZeroAccelerator", remedy + OR_IGNORE)

    def _check(self) -> None:
        """Raise `ValueError` for what cannot be obeyed, also if `accelerate launch` has asked for it."""
        refused = {
            f"distributed_type={self.distributed_type.value}": self.distributed_type not in _KINDS,
            "parallelism_config": self.parallelism_config is not None,
            "DistributedDataParallelKwargs: there is no DistributedDataParallel": self.ddp_handler is not None,
            "dynamo_backend or dynamo_plugin, which compile the model as one: compile each block before prepare, as in "
            "`for block in model.blocks: block.compile()`": self.state.dynamo_plugin.backend != DynamoBackend.NO,
            "mixed_precision='fp8'": self.mixed_precision == "fp8",
            "mixed_precision='fp16' on CPUs, where accelerate ignores it": self.mixed_precision == "fp16"
            and self.scaler is None,
        }
        if found := [name for name, is_refused in refused.items() if is_refused]:
            raise ValueError(f"ZeroAccelerator does not take {found[0]}")
        # accelerate counts the processes once: where there is no GPU, a tracker that asks first finds itself alone
        remedy = "build ZeroAccelerator before any tracker of your own, or begin with accelerate.PartialState(cpu=True)"
        check_started(self.num_processes, "accelerate", remedy)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Place the model, and add autocast if asked for. Local. Raises `ValueError` if it is compiled as one.

        Its backwards raise `RuntimeError` until its optimizer is prepared, unless it is for evaluation.
        """
        if is_compiled_module(model):
            raise ValueError(
                "ZeroAccelerator does not take a model that torch.compile returned: prepare the model itself, and "
                "compile each block before, as in `for block in model.blocks: block.compile()`"
            )
        # "evaluation" leaves DistributedDataParallel out, and nothing else
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
        self._conversions.add(model, trained=not evaluation_mode)
        return prepared

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> DataLoader[Any]:
        """Deal the micro-batches of a loader to the ranks, unless a `MicroBatchSampler` has dealt them. Local.

        Raises `ValueError` if that is one of other ranks, or if another sampler has dealt samples.
        """
        if not hasattr(data_loader, "_is_accelerate_prepared"):  # private: the base takes a prepared one as it is
            if isinstance(data_loader.batch_sampler, MicroBatchSampler):
                placed = self.device_placement if device_placement is None else device_placement
                data_loader = _dealt(data_loader, self, placed)
            else:
                check_undealt(data_loader, "ZeroAccelerator")
        return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)  # type: ignore[no-any-return]

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Build the `ZeroOptimizer` of ``optimizer``, whose model is prepared. All ranks."""
        if isinstance(optimizer, AcceleratedOptimizer):
            return super().prepare_optimizer(optimizer, device_placement)
        prepared = _Prepared(self._conversions.convert(optimizer), device_placement=False, scaler=self.scaler)
        prepared.project = self.project_configuration
        self._optimizers.append(prepared)  # private: the base's method would build the wrapper itself
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Wrap a scheduler, which does not step when its own optimizer has skipped a step. Local."""
        prepared = super().prepare_scheduler(scheduler)
        plain = getattr(scheduler, "optimizer", None)  # which the base does not recognise, and would wait for all
        groups = getattr(plain, "param_groups", None)
        if own := [each for each in self._optimizers if each.optimizer.param_groups is groups]:
            prepared.optimizers = own
        return prepared

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> Any:
        """Register a hook of `save_state`, during which the parameters are whole. Each rank's hook may read them."""

        def whole(*arguments: Any) -> None:
            with gathered(self._conversions.optimizers):
                hook(*arguments)

        return super().register_save_state_pre_hook(whole)

    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip all gradients of an optimizer, and return their norm. All ranks.

        Raises `ValueError` if ``parameters`` are not all trainable parameters of one optimizer, and `RuntimeError`
        while gradients are accumulated.
        """
        if not self.sync_gradients:
            raise RuntimeError(
                "clip_grad_norm_ while gradients are accumulated, of which this is a part: call it only "
                "`if accelerator.sync_gradients:`"
            )
        optimizer = self._conversions.of([parameters] if isinstance(parameters, Tensor) else parameters)
        self.unscale_gradients(optimizer)
        return optimizer.clip_grad_norm_(max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> NoReturn:
        """Raise `NotImplementedError`."""
        raise NotImplementedError("ZeroAccelerator clips by norm, not by value: use clip_grad_norm_")

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> NoReturn:
        """Raise `NotImplementedError`."""
        raise NotImplementedError("ZeroAccelerator has no join_uneven_inputs: use `with optimizer.optimizer.join():`")

    def free_memory(self, *objects: Any) -> Any:
        """Let go of all prepared objects. Local: a sharded model stays so until its ``optimizer.optimizer.close()``."""
        self._conversions.forget()
        return super().free_memory(*objects)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the whole state of a model on rank 0, on the CPU, and {} on other ranks. All ranks.

        With ``ProjectConfiguration(save_on_each_node=True)`` each node's first rank gets it.
        """
        everywhere = self.project_configuration.save_on_each_node and self.is_local_main_process
        return self._conversions.state_dict(self.unwrap_model(model), everywhere)

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **load_model_func_kwargs: Any) -> None:
        """Load what `save_state` wrote. All ranks."""
        with gathered(self._conversions.optimizers, write=True):
            super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)


def check_undealt(loader: DataLoader[Any], where: str) -> DataLoader[Any]:
    """Return the loader. Raises `ValueError` if a sampler has dealt its samples to the ranks: ``where`` would again."""
    outer = [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
    for each in (*outer, *(getattr(sampler, "sampler", None) for sampler in outer)):
        if isinstance(each, MicroBatchSampler) or hasattr(each, "num_replicas"):
            raise ValueError(
                f"{where} would deal out what the {type(each).__name__} has dealt already, so that most of it would "
                "never be trained: give a DataLoader(dataset, batch_size, shuffle=True) without a sampler of ranks"
            )
    return loader


def _dealt(loader: Any, accelerator: Accelerator, placed: bool) -> Any:
    """Return a prepared loader of the micro-batches of a `MicroBatchSampler`, whose epoch decides their order."""
    sampler: MicroBatchSampler = loader.batch_sampler
    place, expected = (sampler.rank, sampler.world), (accelerator.process_index, accelerator.num_processes)
    if place != expected:
        raise ValueError(
            f"ZeroAccelerator: the MicroBatchSampler has (rank, world) = {place} where {expected} is expected: "
            "build it with accelerator.process_index and accelerator.num_processes"
        )
    found = prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=1,  # accelerate deals nothing out
        process_index=0,
        put_on_device=placed,
        rng_types=accelerator.rng_types.copy(),
        non_blocking=accelerator.non_blocking,
        use_stateful_dataloader=accelerator.use_stateful_dataloader,
    )

    def set_epoch(epoch: float) -> None:
        if epoch is not found.iteration:
            sampler.set_epoch(int(epoch))

    found.iteration = math.nan  # accelerate counts up, and sets the epoch to this when an iteration begins
    found.set_epoch = set_epoch
    found._drop_last = True  # else gather_for_metrics takes the last samples for repeated ones
    found._is_accelerate_prepared = True
    return found


class _Prepared(AcceleratedOptimizer):  # type: ignore[misc]
    """The wrapper that skips the steps in which gradients are accumulated, around a `ZeroOptimizer`."""

    project: Any  # accelerate's ProjectConfiguration

    def state_dict(self) -> dict[str, Any]:
        """Return the plain optimizer's dict on rank 0, and {} on other ranks unless each node saves. All ranks."""
        everywhere = self.project.save_on_each_node
        self.optimizer.consolidate_state_dict(None if everywhere else 0)
        found: dict[str, Any] = {} if self.optimizer.rank and not everywhere else self.optimizer.state_dict()
        return found
