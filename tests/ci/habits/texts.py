"""A tokenizer of numbers, made without a file, and texts of them."""

from __future__ import annotations

from typing import Any

import torch

from ..contract.ecosystem import WORDS

LIMIT = 240  # seconds of two ranks on a busy machine
PAD, END = 0, 1


def tokenizer(*, ends: bool = False) -> Any:
    """``ends``: each text has an end."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast  # type: ignore[import-not-found, unused-ignore]

    words = {"<pad>": PAD, "</s>": END, **{str(number): number for number in range(2, WORDS)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if ends:
        made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", END)])
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>")


def texts(count: int, seed: int) -> list[str]:
    """Return texts of unequal lengths."""
    generator = torch.Generator().manual_seed(seed)
    numbers = [torch.randint(2, WORDS, (2 + 3 * number % 7,), generator=generator).tolist() for number in range(count)]
    return [" ".join(map(str, each)) for each in numbers]
