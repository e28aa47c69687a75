"""A whole script of transformers' Trainer: a small Llama learns the text of a Python file. Put in your model and data.

    python -m zero.examples.hf_trainer
    torchrun --nproc-per-node 2 -m zero.examples.hf_trainer --stage 3 --learning_rate 1e-3

All arguments of `TrainingArguments` are flags. A step takes 4 micro-batches over all ranks, so 1, 2 or 4 ranks train
the same bits, whose SHA-256 is the last line. If a run was stopped, start it again, at any stage and on any of these
numbers of ranks: it goes on from the newest checkpoint in its output_dir. Remove that folder to begin anew.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

from zero.integrations.transformers import ZeroConfig, ZeroTrainer

LENGTH = 64  # bytes in a sample
MICRO_BATCHES = 4  # of a step, over all ranks


def samples(file: str) -> list[dict[str, Tensor]]:
    """Return the bytes of a file in rows of LENGTH, int64, as inputs and labels of a causal language model."""
    if not Path(file).is_file() or Path(file).stat().st_size < 10 * LENGTH:
        raise SystemExit(f"--data {file!r} must be a file of at least {10 * LENGTH} bytes")
    text = torch.frombuffer(bytearray(Path(file).read_bytes()), dtype=torch.uint8).long()
    rows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    kind: Any = TrainingArguments
    parser: Any = HfArgumentParser(kind, description=__doc__)
    parser.add_argument("--stage", type=int, choices=range(4), default=3)
    parser.add_argument("--data", default=argparse.__file__, help="a file; by default argparse.py of Python")
    parser.set_defaults(
        output_dir="zero-hf-trainer",
        max_steps=40,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        weight_decay=0.1,
        warmup_steps=4,
        lr_scheduler_type="cosine",
        eval_strategy="steps",
        eval_steps=20,
        save_steps=20,
        save_total_limit=2,
        logging_steps=10,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    args, more = parser.parse_args_into_dataclasses()
    if MICRO_BATCHES % args.world_size:
        raise SystemExit(f"{MICRO_BATCHES} micro-batches a step need 1, 2 or 4 ranks, not {args.world_size}")
    args.gradient_accumulation_steps = MICRO_BATCHES // args.world_size

    torch.set_num_threads(1)  # their number changes bits
    set_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=LENGTH, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    rows = samples(more.data)
    cut = len(rows) * 9 // 10
    model = LlamaForCausalLM(config)
    trainer = ZeroTrainer(
        model=model,
        args=args,
        train_dataset=rows[:cut],
        eval_dataset=rows[cut:],
        zero=ZeroConfig(stage=more.stage),
    )
    is_begun = any(Path(args.output_dir).glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=is_begun)
    trainer.save_model(f"{args.output_dir}/model")
    trainer.end()  # the model is plain again, and whole on every rank
    if args.process_index == 0:
        weights = b"".join(value.cpu().numpy().tobytes() for value in model.state_dict().values())
        print(f"SHA-256 {hashlib.sha256(weights).hexdigest()}")


if __name__ == "__main__":
    main()
