"""Shared by tests beside other libraries: small models of transformers, their data, and Trainer's plain loop."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import lr_scheduler

from ...support.loops import LossOf, PlainLoop, seeded
from ...support.models import take_steps

os.environ["HF_HUB_OFFLINE"] = "1"  # forbid downloads, also in the processes that import this file

STAGES = (0, 1, 2, 3)
WORLD_SIZE = 2
WORDS, LENGTH = 31, 8
COUNT = 8  # micro-batches: four steps

State = dict[str, Tensor]


def state_of(model: nn.Module) -> State:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=16, n_layer=3, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, attention_dropout=0.0, bos_token_id=0, eos_token_id=0,
        attn_implementation="eager",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def tokens(count: int) -> list[Any]:
    return list(torch.randint(0, WORDS, (count, 2, LENGTH), generator=torch.Generator().manual_seed(1)))


def language_loss(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=batch, labels=batch).loss
    return loss


def train_on_tokens(names: dict[str, Any]) -> None:
    batches = tokens(4)[names["rank"] :: WORLD_SIZE]
    take_steps(names["model"], names["optimizer"], batches, language_loss)


def variables(started: dict[str, Any], stage: int, **more: Any) -> dict[str, Any]:
    """Return the variables of a block: those of the block `Start`, and more."""
    names = {name: value for name, value in started.items() if not name.startswith("__")}
    return {**names, "stage": stage, "device": "cpu", "loss_fn": nn.functional.mse_loss, **more}


def by_micro_batch(calls: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Return the calls of all ranks, in the order of the micro-batches."""
    by_rank: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(by_rank, calls)
    return [call for calls_of_all in zip(*by_rank, strict=True) for call in calls_of_all]


DATASET = [{"input_ids": row, "labels": row} for row in torch.cat(tokens(8))]


def training_arguments(folder: Path, **others: Any) -> Any:
    from transformers import TrainingArguments

    given: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "num_train_epochs": 2, "learning_rate": 1e-2, "warmup_steps": 1, "max_grad_norm": 0.5, "weight_decay": 0.1,
        "adam_beta2": 0.95, "use_cpu": True, "report_to": [], "save_strategy": "no", "logging_strategy": "no",
        "disable_tqdm": True,
    }  # fmt: skip
    return TrainingArguments(**{**given, **others})


def note_inputs(model: nn.Module, calls: list[dict[str, Tensor]]) -> Any:
    """Append the tensors of each call to ``calls``. Return the hook's handle."""

    def note(_: nn.Module, __: Any, given: dict[str, Any]) -> None:
        calls.append({name: value.clone() for name, value in given.items() if isinstance(value, Tensor)})

    return model.register_forward_pre_hook(note, with_kwargs=True)


def plain_trainer(loss_of: LossOf, calls: list[Any]) -> nn.Module:
    """Train as Trainer does: four micro-batches a step, the schedule of four steps, no decay of biases and norms."""
    from transformers import get_linear_schedule_with_warmup

    def schedule(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        found: lr_scheduler.LRScheduler = get_linear_schedule_with_warmup(optimizer, 1, 4)
        return found

    model: Any = seeded(5, gpt2)
    model.config.use_cache = False  # as Trainer sets it; with a cache, attention differs in the last bits
    wide = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    rest = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": wide, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    loop = PlainLoop(
        loss_of,
        together=4,
        divisor=lambda _: WORLD_SIZE,
        scheduler=schedule,
        max_norm=0.5,
        optimizer=torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True),
    )
    loop.run(model, calls)
    return model  # type: ignore[no-any-return]
