"""Arguments of Trainer that `ZeroTrainer` refuses, each with a value and words of the error."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Refused:
    """``words``: of the reason or of the remedy. ``taken``: a value beside None that is not refused."""

    argument: str
    value: Any
    words: str
    taken: Any = field(default=None)

    def __str__(self) -> str:
        return f"{self.argument}={self.value}"


EIGHT_BITS = "which has no such exception"
CASTS = "with bf16=True evaluation runs under autocast"
REFUSED = (
    Refused("deepspeed", "ds.json", "zero=ZeroConfig(stage=", ""),
    Refused("fsdp", True, "zero=ZeroConfig(stage=3)", False),
    Refused("fsdp_config", {"version": 2}, "zero=ZeroConfig(stage=3)", {}),
    Refused("parallelism_config", "sizes", "no tensor, context or sequence parallelism"),
    Refused("ddp_find_unused_parameters", False, "there is no DistributedDataParallel"),
    Refused("ddp_bucket_cap_mb", 25, "zero=ZeroConfig(bucket_cap_mb="),
    Refused("ddp_broadcast_buffers", False, "zero_optimizer.broadcast_buffers()"),
    Refused("ddp_static_graph", True, "a graph may change from step to step"),
    Refused("fp16", True, "give bf16=True, or zero=ZeroConfig(mixed_precision=", False),
    Refused("fp16_full_eval", True, CASTS, False),
    Refused("bf16_full_eval", True, CASTS, False),
    Refused("torch_compile_mode", "reduce-overhead", "CUDA graphs", "default"),
    Refused("torch_compile_mode", "max-autotune", "CUDA graphs", "max-autotune-no-cudagraphs"),
    Refused("torch_compile_backend", "cudagraphs", "CUDA graphs", "inductor"),
    Refused("use_liger_kernel", True, "need a GPU", False),
    Refused("liger_kernel_config", {"rope": True}, "use_liger_kernel alone reads it"),
    *(
        Refused(f"{kind}_checkpointing_kwargs", {option: True}, f'leave "{option}" out', {option: False})
        for kind in ("activation", "gradient")
        for option in ("use_reentrant", "offload")
    ),
    Refused("optim", "adamw_bnb_8bit", EIGHT_BITS, "adamw_torch"),
    Refused("optim", "adamw_8bit", EIGHT_BITS, "adamw_torch_8bit"),
    Refused("optim", "ademamix", EIGHT_BITS, "adamw_torch_4bit"),
    Refused("optim", "lion_32bit", EIGHT_BITS, "sgd"),
    Refused("optim", "paged_adamw_32bit", EIGHT_BITS, "adamw_torch_fused"),
    Refused("optim", "rmsprop_bnb", EIGHT_BITS, "rmsprop"),
    Refused("optim", "galore_adamw_layerwise", "it projects whole matrices", "adagrad"),
    Refused("optim", "apollo_adamw", "it projects whole matrices", "adafactor"),
    Refused("optim", "lomo", "inside the backward"),
    *(
        Refused("optim", name, "is not among those with which ZeroTrainer is tested")
        for name in ("adamw_torch_xla", "adamw_torch_npu_fused", "adamw_anyprecision", "grokadamw", "stable_adamw")
    ),
    Refused("optim_target_modules", "all-linear", "GaLore and APOLLO alone"),
    Refused("auto_find_batch_size", True, "per_device_train_batch_size", False),
    Refused("train_sampling_strategy", "group_by_length", 'give "batch_rebalance"', "sequential"),
    Refused("accelerator_config", {"even_batches": False}, "dataloader_drop_last=True", {"even_batches": True}),
    Refused("enable_jit_checkpoint", True, 'save_strategy="steps"', False),
    Refused("activation_offloading", True, "it needs a GPU", False),  # of TRL
    Refused("debug", ["tpu_metrics_debug"], "there is no TPU", ["underflow_overflow"]),
)
