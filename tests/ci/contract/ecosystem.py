"""Shared by tests beside other libraries: small models of transformers, and their data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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
