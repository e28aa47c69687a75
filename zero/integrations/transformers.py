"""`ZeroTrainer`: the Trainer of transformers with a `ZeroOptimizer`. Needs transformers and accelerate.

A name that begins with an underscore is private there. So a release may change it; the comment beside each says why it
is needed.

The arguments of transformers' Trainer that `ZeroTrainer` cannot obey: each one with the reason and the remedy.

Knows: which methods of Trainer and Accelerator build the optimizer, clip, save and load, and which of their arguments
are refused. Does not know: how a step is taken. `weights_of` and `init_of` are in `transformers_weights`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn
from transformers import Trainer  # type: ignore[import-not-found, unused-ignore]

from collectives import Kind, Tag

from ..config import ShardingOptions, transport_of
from ..optimizer import ZeroOptimizer
from .accelerate import check_undealt
from .conversion import Conversions, check_started, gathered, held_in, hold, release
from .transformers_weights import init_of, weights_of

NO_DDP = "there is no DistributedDataParallel"
OWN_SHARDING = "the optimizer shards by itself"
CASTS = "it casts the model in evaluation, and the optimizer holds the parameters as they were"
CUDA_GRAPHS = "it captures CUDA graphs, and the optimizer moves the memory that they would read"
LEAVE_OUT = "leave it out"


@dataclass(frozen=True)
class Refusal:
    """Values of an argument that are refused. ``refuses`` sees every value but None, which is never refused."""

    argument: str
    why: str
    remedy: str
    refuses: Callable[[Any], object] = lambda value: True


def _plain(value: Any) -> Any:
    """Return the value of a member of an enumeration, and any other value as it is."""
    return value.value if isinstance(value, Enum) else value


def _starts(*beginnings: str) -> Callable[[Any], bool]:
    return lambda value: str(_plain(value)).startswith(beginnings)


def _is(*names: str) -> Callable[[Any], bool]:
    return lambda value: _plain(value) in names


def _has(key: str, wanted: bool) -> Callable[[Any], bool]:
    """Return whether a mapping, or an object, has ``wanted`` for a key."""
    return lambda given: (given.get(key) if isinstance(given, Mapping) else getattr(given, key, None)) is wanted


EIGHT_BITS = ("adamw_bnb", "adamw_8bit", "ademamix", "lion", "paged_", "rmsprop_bnb")

REFUSALS = (
    Refusal("deepspeed", OWN_SHARDING, "leave it out, and give zero=ZeroConfig(stage=...)", bool),
    Refusal("fsdp", OWN_SHARDING, "leave it out, and give zero=ZeroConfig(stage=3)", bool),
    Refusal("fsdp_config", OWN_SHARDING, "leave it out, and give zero=ZeroConfig(stage=3)", bool),
    Refusal("parallelism_config", "the ranks share data alone: no tensor, context or sequence parallelism", LEAVE_OUT),
    Refusal("ddp_find_unused_parameters", NO_DDP, "leave it out: a parameter that no rank uses needs no search"),
    Refusal("ddp_bucket_cap_mb", NO_DDP, "leave it out, and give zero=ZeroConfig(bucket_cap_mb=...)"),
    Refusal(
        "ddp_broadcast_buffers",
        NO_DDP,
        "leave it out: buffers are each rank's own, and trainer.zero_optimizer.broadcast_buffers() copies rank 0's",
    ),
    Refusal("ddp_static_graph", NO_DDP, "leave it out: a graph may change from step to step"),
    Refusal(
        "fp16",
        "its loss scaling by Accelerator needs a GPU, and was not tried beside sharded gradients",
        "give bf16=True, or zero=ZeroConfig(mixed_precision=MixedPrecision(torch.bfloat16))",
        bool,
    ),
    Refusal("fp16_full_eval", CASTS, "leave it out: with bf16=True evaluation runs under autocast, too", bool),
    Refusal("bf16_full_eval", CASTS, "leave it out: with bf16=True evaluation runs under autocast, too", bool),
    Refusal("torch_compile_mode", CUDA_GRAPHS, LEAVE_OUT, _is("reduce-overhead", "max-autotune")),
    Refusal("torch_compile_backend", CUDA_GRAPHS, LEAVE_OUT, _is("cudagraphs")),
    Refusal("use_liger_kernel", "its kernels need a GPU, and were not tried at stage 3", LEAVE_OUT, bool),
    Refusal("liger_kernel_config", "use_liger_kernel alone reads it, which is refused", LEAVE_OUT),
    *(
        Refusal(argument, why, remedy, _has(key, True))
        for argument in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")  # the older name
        for key, why, remedy in (
            (
                "use_reentrant",
                "re-entrant checkpointing runs a backward inside the backward, whose gradients cannot be reduced once",
                'leave "use_reentrant" out, or give False',
            ),
            (
                "offload",
                '"offload" moves what the backward reads to the host, and was not tried beside sharded parameters',
                'leave "offload" out',
            ),
        )
    ),
    Refusal(
        "optim",
        "Trainer keeps embeddings in 32 bits by naming parameters, which a shard is not; the paged ones need a GPU",
        "give optimizer_cls_and_kwargs=(a class of bitsandbytes, its arguments), which has no such exception, or "
        'optim="adamw_torch_8bit"',
        _starts(*EIGHT_BITS),
    ),
    Refusal(
        "optim",
        "it projects whole matrices by groups of its own",
        'give optim="adafactor", or a class of low-rank states by optimizer_cls_and_kwargs',
        _starts("galore_", "apollo_"),
    ),
    Refusal(
        "optim", "it updates inside the backward, before a mean exists", 'give optim="sgd"', _is("lomo", "adalomo")
    ),
    Refusal(
        "optim",
        "its library is not among those with which ZeroTrainer is tested",
        "give optimizer_cls_and_kwargs=(class, arguments): a class that cannot be sharded is then refused by its name",
        _is("adamw_torch_xla", "adamw_torch_npu_fused", "adamw_anyprecision", "grokadamw", "stable_adamw"),
    ),
    Refusal("optim_target_modules", "GaLore and APOLLO alone read it, which are refused", LEAVE_OUT),
    Refusal(
        "auto_find_batch_size",
        "each rank would begin anew with a smaller batch when its own memory ends",
        "give per_device_train_batch_size and gradient_accumulation_steps",
        bool,
    ),
    Refusal(
        "train_sampling_strategy",
        "its sampler draws from the global generator of each rank, so ranks may deal different orders",
        'give "batch_rebalance", which orders by length with one seed, or "random"',
        _is("group_by_length"),
    ),
    Refusal(
        "accelerator_config",
        "with even_batches=False ranks have different numbers of micro-batches, and would wait for each other",
        "leave it out, or give dataloader_drop_last=True",
        _has("even_batches", False),
    ),
    Refusal(
        "enable_jit_checkpoint",
        "each rank would save in the step in which it gets its own signal",
        'give save_strategy="steps"',
        bool,
    ),
    Refusal("activation_offloading", "it needs a GPU, and was not tried beside sharded parameters", LEAVE_OUT, bool),
    Refusal("debug", "there is no TPU", LEAVE_OUT, lambda given: "tpu_metrics_debug" in map(_plain, given)),
)


def check_arguments(args: Any) -> None:
    """Raise `ValueError` at the first argument that cannot be obeyed. ``args``: a `TrainingArguments`. Local."""
    for refusal in REFUSALS:
        value = getattr(args, refusal.argument, None)
        if value is not None and refusal.refuses(value):
            raise ValueError(
                f"ZeroTrainer does not take TrainingArguments({refusal.argument}={_plain(value)!r}): {refusal.why}; "
                f"{refusal.remedy}"
            )


def check_process(args: Any) -> None:
    """Raise `ValueError` if this process would not be one rank with one device. Local."""
    if args.n_gpu > 1:
        raise ValueError(
            f"ZeroTrainer does not take {args.n_gpu} GPUs in one process, which Trainer would drive by DataParallel; "
            f"start one process per GPU: torchrun --nproc-per-node {args.n_gpu} SCRIPT"
        )
    check_started(args.world_size, "TrainingArguments", "without a GPU give TrainingArguments(use_cpu=True)")


def check_accelerator(accelerator: Any) -> None:
    """Raise `ValueError` if `accelerate launch`, or its variables, ask for what the arguments may not ask. Local."""
    state = accelerator.state
    for plugin in ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin"):
        if getattr(state, plugin, None) is not None:
            raise ValueError(
                f"ZeroTrainer does not take Accelerator's {plugin}, which its environment has chosen: {OWN_SHARDING}; "
                "start with torchrun, or choose a plain configuration by `accelerate config`"
            )
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise ValueError(
            f"ZeroTrainer does not take ACCELERATE_MIXED_PRECISION={accelerator.mixed_precision}: it was not tried "
            "beside sharded gradients; choose bf16 or no"
        )


ALIKE = (
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "num_train_epochs",
    "max_steps", "dataloader_drop_last", "train_sampling_strategy", "max_grad_norm", "eval_strategy", "eval_steps",
    "save_strategy", "save_steps", "load_best_model_at_end",
)  # fmt: skip
"""The arguments by which a rank chooses its samples and its calls of all ranks."""


def choices_of(args: Any, dataset: Any, name: str) -> dict[str, Any]:
    """Return what decides which samples this rank takes, and when it calls the other ranks. Local.

    ``dataset``, with a name for errors, is what the rank draws its samples from; its length counts, if it has one.
    """
    found = {f"TrainingArguments({argument}=...)": _plain(getattr(args, argument, None)) for argument in ALIKE}
    found["TrainingArguments(data_seed=...), by default its seed,"] = (
        args.seed if args.data_seed is None else args.data_seed
    )
    if not args.accelerator_config.dispatch_batches:  # else rank 0 reads for all
        found[f"the length of the {name}"] = len(dataset) if isinstance(dataset, Sized) else None
    return found


def check_choices(choices: Sequence[Mapping[str, Any]]) -> None:
    """Raise `ValueError` if the choices of the ranks, in their order, differ. Local."""
    for rank, others in enumerate(choices):
        for what, value in choices[0].items():
            if others.get(what) != value:
                raise ValueError(
                    f"ZeroTrainer: {what} is {value!r} on rank 0 and {others.get(what)!r} on rank {rank}: give all "
                    "ranks the same arguments and the same whole dataset, of which Trainer deals each rank its part"
                )


def check_ranks(args: Any, dataset: Any, name: str) -> None:
    """Raise `ValueError` on all ranks if they would take samples, or steps, that do not fit together. All ranks."""
    if args.world_size > 1:
        mine = json.dumps(choices_of(args, dataset, name)).encode()
        theirs = transport_of(None).exchange(mine, Tag(Kind.EXCHANGE, "the arguments of ZeroTrainer"))
        check_choices([json.loads(each) for each in theirs])


_REMEDY = "let ZeroTrainer build the optimizer, and unfreeze the parameter before train()"

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
        self._conversions = Conversions(self.zero.arguments(), "ZeroTrainer", _REMEDY)
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
        prepare_model, prepare, deal = found.prepare_model, found.prepare_optimizer, found.prepare_data_loader
        # Four public methods, replaced on this object. In its evaluation mode Accelerator does all but put
        # DistributedDataParallel around the model: autocast, compilation. The model is on its device, and has no
        # memory to be moved once it is sharded. To place an optimizer, Accelerator asks each rank for all states.
        found.prepare_model = lambda model, *_, **__: prepare_model(model, device_placement=False, evaluation_mode=True)
        found.prepare_optimizer = lambda optimizer, *_, **__: prepare(self._sharded(optimizer), device_placement=False)
        found.prepare_data_loader = lambda loader, *rest, **named: deal(
            check_undealt(loader, "ZeroTrainer"), *rest, **named
        )
        found.clip_grad_norm_ = lambda _, *limits, **named: self._trained("clips").clip_grad_norm_(*limits, **named)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Move the model. Private: that of another trainer is there, and may be sharded, when this one is built."""
        if not held_in(model):
            super()._move_model_to_device(model, device)

    def _trained(self, does: str) -> ZeroOptimizer:
        if self.zero_optimizer is None:
            raise RuntimeError(f"ZeroTrainer {does} after train() has built the optimizer: call it from there")
        return self.zero_optimizer

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Build the `ZeroOptimizer` of the arguments' class and param groups. All ranks. Trainer calls it.

        A subclass may build another optimizer over the model's parameters, and assign it to ``self.optimizer``. A plain
        one becomes a `ZeroOptimizer`.
        """
        check_ranks(self.args, self.train_dataset, "train_dataset")
        if self.optimizer is None:
            trained = self._plain_model()
            optimizer_class, given = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(
                self.args, trained
            )
            if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
                return super().create_optimizer(model)  # a factory, which Trainer calls
            decayed = set(self.get_decay_parameter_names(trained))
            groups: list[dict[str, Any]] = [
                {"params": [], "weight_decay": weight_decay} for weight_decay in (self.args.weight_decay, 0.0)
            ]
            for name, parameter in trained.named_parameters():
                if parameter.requires_grad:
                    groups[name not in decayed]["params"].append((name, parameter))
            arguments = {key: value for key, value in given.items() if key != "params"}
            self.optimizer = self.zero_optimizer = ZeroOptimizer(
                given.get("params", groups),
                optimizer_class,
                module=trained,
                **self.zero.arguments(),
                optimizer_kwargs=arguments,
            )
        return self.optimizer

    def _plain_model(self) -> Any:
        """Return the model, which no optimizer shards any longer: neither that of another trainer of the same model,
        nor that of the model before, if `model_init` has built another one. All ranks."""
        if self.zero_optimizer is not None:
            self.zero_optimizer.close()
        found: Any = self.model
        release(found)
        return found

    def _sharded(self, optimizer: Any) -> Any:
        """Return what Accelerator prepares: the `ZeroOptimizer` of ``optimizer``, which a subclass may have built. All
        ranks."""
        found = getattr(optimizer, "optimizer", optimizer)  # of Accelerator's wrapper, from the second `train` on
        if not isinstance(found, ZeroOptimizer):
            check_ranks(self.args, self.train_dataset, "train_dataset")
            self._conversions.options = self.zero.arguments()  # `zero` may have been set since
            self._conversions.add(self._plain_model())
            optimizer = found = self._conversions.convert(optimizer)
            self._conversions.forget()
        elif found is not self.zero_optimizer and self.zero != ZeroConfig():
            raise ValueError("ZeroTrainer got zero=..., and create_optimizer built a ZeroOptimizer: give one alone")
        if found._engine.is_closed:
            raise RuntimeError(
                "the optimizer of this ZeroTrainer was closed, by close() or by another trainer of the same model: "
                "build a new ZeroTrainer"
            )
        self.zero_optimizer = found
        model: Any = self.model
        if found not in held_in(model):
            hold(model, found)
            self._conversions.adopt(model, found)
            self._conversions.add(model)
        return optimizer

    def evaluation_loop(self, dataloader: Any, *arguments: Any, **named: Any) -> Any:
        """Evaluate or predict, as Trainer does. All ranks. `evaluate` and `predict` call it."""
        check_ranks(self.args, getattr(dataloader, "dataset", None), "evaluation dataset")
        # Private: a Seq2SeqTrainer beside this class generates with these arguments. At stage 3 each rank then runs as
        # many forwards as the rank with the longest text, since they gather units. That class keeps the samples which
        # Accelerator repeats, so that ranks have as many; they are cut off here, as Trainer does.
        generates = getattr(self, "_gen_kwargs", None)
        if generates is not None and self.args.world_size > 1:
            self.gather_function = self.accelerator.gather_for_metrics
            if held_in(self.model):
                generates.setdefault("synced_gpus", True)
        return super().evaluation_loop(dataloader, *arguments, **named)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model, as Trainer does. All ranks; rank 0 writes."""
        with gathered(held_in(self.model)):
            super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the whole optimizer. Private: Trainer has no call before it reads ``state_dict()`` where it saves."""
        self._trained("saves").consolidate_state_dict(None if self.args.save_on_each_node else 0)
        super()._save_optimizer_and_scheduler(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the model. Private: at a second `train` it is sharded, and Trainer has no call around its loading."""
        with gathered(held_in(self.model), write=True):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        """Load the best model into the sharded one. Private: Trainer has no call around it."""
        with gathered(held_in(self.model), write=True):
            super()._load_best_model()

    def end(self) -> None:
        """Make the model plain again, and end as Trainer does: trackers and the process group. All ranks."""
        if self.zero_optimizer is not None:
            self.zero_optimizer.close()
        super().end()  # type: ignore[no-untyped-call, unused-ignore]
