"""A small model that holds every kind of parameter that has ever broken a library like this one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)
_BUILDING = threading.Lock()  # all threads share torch's generator


def seeded(seed: int, build: Callable[[], Model]) -> Model:
    """Build a model whose weights follow from a seed alone, also where ranks are threads."""
    with _BUILDING, torch.random.fork_rng():
        torch.manual_seed(seed)
        return build()


class Odd(nn.Module):
    """Parameters of all kinds. At stage 3 there are three units: one is used twice, and one is never used."""

    def __init__(self, dtype: torch.dtype = torch.float32, width: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width, dtype=dtype)
        self.first = nn.Linear(width, 13, dtype=dtype)
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))
        self.one = nn.Parameter(torch.ones(1, dtype=dtype))
        self.empty = nn.Parameter(torch.zeros(0, 3, dtype=dtype))
        self.turned = nn.Parameter(torch.randn(13, 17, dtype=dtype).t())
        self.frozen = nn.Parameter(torch.randn(5, dtype=dtype), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(19, dtype=dtype))
        self.sometimes = nn.Linear(13, 13, dtype=dtype)
        self.convolution = nn.Conv2d(1, 3, 2, dtype=dtype).to(memory_format=torch.channels_last)
        self.layers = nn.ModuleList(
            [
                nn.Linear(13, 13, dtype=dtype),
                nn.Sequential(nn.Linear(13, 3, dtype=dtype), nn.Linear(3, 13, dtype=dtype)),
            ]
        )
        self.layers.append(nn.Linear(2, 2, dtype=dtype))
        self.last = nn.Linear(13, width, dtype=dtype)
        self.head = nn.Linear(width, 11, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.randn(13, dtype=dtype))

    def forward(self, tokens: Tensor, extra: bool = False) -> Tensor:
        hidden = torch.tanh(self.first(self.embed(tokens))) * self.scale + self.one + self.offset + self.empty.sum()
        hidden = hidden + hidden @ self.turned[:13]
        if extra:
            hidden = hidden + self.sometimes(hidden)
        for layer in (self.layers[0], self.layers[1], self.layers[0]):
            hidden = hidden + torch.tanh(layer(hidden))
        image = hidden.view(1, 1, -1, 13).contiguous()
        hidden = hidden + self.convolution(image).mean()
        return self.head(self.last(hidden))


def odd_loss(model: nn.Module, batch: tuple[Tensor, bool]) -> Tensor:
    tokens, extra = batch
    logits = model(tokens[:-1], extra)
    return nn.functional.cross_entropy(logits.float() if logits.dtype.itemsize < 4 else logits, tokens[1:])


def odd_batches(count: int, seed: int = 0, extra: bool = True) -> list[tuple[Tensor, bool]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randint(0, 11, (9,), generator=generator), extra and j % 3 == 1) for j in range(count)]


def build(seed: int = 0, dtype: torch.dtype = torch.float32) -> Odd:
    return seeded(seed, lambda: Odd(dtype))


def take_steps(model: Any, optimizer: Any, batches: Iterable[Any], loss_of: Callable[..., Any] = odd_loss) -> None:
    """Take a step for each micro-batch."""
    for batch in batches:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
