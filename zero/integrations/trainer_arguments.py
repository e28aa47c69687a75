"""The arguments of transformers' Trainer that `ZeroTrainer` cannot obey: each one with the reason and the remedy.

Knows: names and values of `TrainingArguments`, of Accelerator and of the process. Imports neither transformers nor
accelerate. All other arguments are obeyed by Trainer's own code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from enum import Enum
from typing import Any

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


REENTRANT = Refusal(
    "activation_checkpointing_kwargs",
    "re-entrant checkpointing runs a backward inside the backward, whose gradients cannot be reduced once",
    'leave "use_reentrant" out, or give False',
    _has("use_reentrant", True),
)
OFFLOADED = Refusal(
    "activation_checkpointing_kwargs",
    '"offload" moves what the backward reads to the host, and was not tried beside sharded parameters',
    'leave "offload" out',
    _has("offload", True),
)
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
    REENTRANT,
    OFFLOADED,
    *(
        Refusal("gradient_checkpointing_kwargs", refusal.why, refusal.remedy, refusal.refuses)  # its older name
        for refusal in (REENTRANT, OFFLOADED)
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
    started = os.environ.get("WORLD_SIZE", "1")
    if started.isdecimal() and int(started) > args.world_size:
        raise ValueError(
            f"{started} processes were started, but TrainingArguments has found {args.world_size}: each would train "
            "alone; without a GPU give TrainingArguments(use_cpu=True)"
        )


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
        check_choices([json.loads(theirs) for theirs in _exchange(mine, args)])


def _exchange(data: bytes, args: Any) -> list[bytes]:
    """Return every rank's bytes, in rank order. All ranks. Nothing of a peer is unpickled."""
    import torch
    import torch.distributed as dist  # noqa: TID251 - Trainer has made the world's group

    def gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.empty_like(tensor) for _ in range(args.world_size)]
        dist.all_gather(found, tensor)
        return found

    sizes = [int(size) for size in gathered(torch.tensor([len(data)], device=args.device))]
    padded = torch.tensor(list(data.ljust(max(sizes), b" ")), dtype=torch.uint8, device=args.device)
    return [bytes(each.tolist()[:size]) for each, size in zip(gathered(padded), sizes, strict=True)]


def process_group_of(args: Any) -> Any:
    """Return the process group of the optimizer: the world's, or a new one if that lacks gloo. All ranks."""
    import torch.distributed as dist  # noqa: TID251 - Trainer has made the world's group, on GPUs of NCCL alone

    if args.world_size == 1 or "gloo" in str(dist.get_backend_config()):
        return None
    backend = f"cpu:gloo,{args.device.type}:{dist.get_backend()}"
    return dist.new_group(backend=backend, timeout=args.ddp_timeout_delta)
