"""The loss of a small GPT in bf16 with fp32 masters, and without them, rounded to the nearest and at random.

    python -m benchmarks.rounding [--steps N] [--seeds N]

All three are plain loops in one process, over the same model, batches and AdamW. The model computes in fp32, with
weights that are numbers of bf16. So the loops differ only in what they keep, and in how they round. The ranks of a
`ZeroOptimizer` have the same bits (tests/laws/test_bits.py).

Knows: the three loops. Does not know: ranks, time.
"""

from __future__ import annotations

import argparse
import statistics
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from zero import StochasticRounding

from .gpt import Shape, build, loss_fn

BF16 = torch.bfloat16
SHAPE, SEQUENCE, BATCH, LEARNING_RATE = Shape(2, 4, 64), 64, 8, 3e-4
SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}

Step = Callable[[], None]


class Nearest(StochasticRounding):
    """Rounds to the nearest number."""

    def round(
        self, values: Tensor, *, parameter: int = 0, step: int = 0, state: str | None = None, begin: int = 0
    ) -> Tensor:
        return values.to(BF16)


def with_masters(model: nn.Module) -> Step:
    """Return the step of a loop with fp32 masters and states, of which the model has rounded copies."""
    parameters = list(model.parameters())
    masters = [parameter.detach().clone().requires_grad_() for parameter in parameters]
    optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE)
    _give(model, masters)

    def step() -> None:
        for parameter, master in zip(parameters, masters, strict=True):
            master.grad = parameter.grad
        optimizer.step()
        _give(model, masters)

    return step


def rounded(model: nn.Module, rounding: StochasticRounding) -> Step:
    """Return the step of a loop whose weights and states are bf16 between two steps."""
    parameters = list(model.parameters())
    narrow = [parameter.detach().to(BF16).requires_grad_() for parameter in parameters]
    optimizer = torch.optim.AdamW(narrow, lr=LEARNING_RATE)
    _give(model, narrow)

    def step() -> None:
        rounding.step(optimizer, {mine: p.grad for mine, p in zip(narrow, parameters, strict=True)})
        _give(model, narrow)

    return step


@torch.no_grad()
def _give(model: nn.Module, weights: Sequence[Tensor]) -> None:
    """Give the model these weights, rounded to bf16, and clear its gradients."""
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        parameter.copy_(weight.to(BF16))
        parameter.grad = None


LOOPS: dict[str, Callable[[nn.Module, int], Step]] = {
    "fp32 masters": lambda model, _: with_masters(model),
    "bf16, to the nearest": lambda model, _: rounded(model, Nearest()),
    "bf16, at random": lambda model, seed: rounded(model, StochasticRounding(seed)),
}


def library_text() -> Tensor:
    """Return the bytes of Python's standard library, file by file in the order of their paths."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in root.rglob("*.py") if SKIPPED.isdisjoint(file.relative_to(root).parts)]
    files.sort(key=lambda file: file.relative_to(root).as_posix())
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def loss_at(model: nn.Module, text: Tensor, starts: Sequence[int]) -> Tensor:
    rows = torch.stack([text[start : start + SEQUENCE + 1] for start in starts]).long()
    return loss_fn(model(rows[:, :-1]), rows[:, 1:])


def loss_of(kind: str, text: Tensor, steps: int, seed: int) -> float:
    """Train, and return the loss on the last tenth of the text, which is for validation."""
    model, cut = build(SHAPE, SEQUENCE, seed), len(text) * 9 // 10
    train, validation = text[:cut], text[cut:]
    step = LOOPS[kind](model, seed)
    for number in range(steps):
        places = np.random.default_rng((seed, number, 0)).integers(0, cut - SEQUENCE, size=BATCH)
        loss_at(model, train, places.tolist()).backward()  # type: ignore[no-untyped-call]
        step()
    starts = [(len(validation) - SEQUENCE - 1) * place // 255 for place in range(256)]
    with torch.no_grad():
        return statistics.fmean(float(loss_at(model, validation, starts[i : i + 16])) for i in range(0, 256, 16))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rounding", description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=1)
    asked = parser.parse_args(arguments)
    text = library_text()
    print(f"loss on the validation text after {asked.steps} steps, of seeds 0 to {asked.seeds - 1}")
    for kind in LOOPS:
        found = [loss_of(kind, text, asked.steps, seed) for seed in range(asked.seeds)]
        print(f"{kind:<22}", *(f"{loss:.4f}" for loss in found), f"mean {statistics.fmean(found):.4f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(2)  # their number changes the last digits
    main()
