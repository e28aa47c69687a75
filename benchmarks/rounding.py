"""The loss of a small GPT in bf16 with fp32 masters, and without them, rounded to the nearest and at random.

    python -m benchmarks.rounding [--steps N] [--seeds N]

All three are plain loops in one process, over the same model, batches and AdamW. The model computes in fp32, with
weights that are numbers of bf16. So the loops differ only in what they keep, and in how they round. The ranks of a
`ZeroOptimizer` have the same bits (tests/step/test_rounding.py).

Knows: the three loops. Does not know: ranks, time.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from zero import StochasticRounding
from zero.commands.train.data import Corpus, load_corpus
from zero.commands.train.model import build_model, loss_fn

BF16 = torch.bfloat16
PRESET, SEQUENCE, BATCH, LEARNING_RATE = "tiny", 64, 8, 3e-4

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


def loss_of(kind: str, corpus: Corpus, steps: int, seed: int) -> float:
    """Train, and return the loss on the text for validation."""
    model = build_model(PRESET, SEQUENCE, seed)
    step = LOOPS[kind](model, seed)
    for number in range(steps):
        batch = corpus.micro_batch(seed, number, 0, BATCH, SEQUENCE)
        loss_fn(model(batch.inputs), batch.targets).backward()  # type: ignore[no-untyped-call]
        step()
    with torch.no_grad():
        batches = corpus.validation_batches(16, SEQUENCE, 256)
        return statistics.fmean(float(loss_fn(model(each.inputs), each.targets)) for each in batches)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rounding", description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=1)
    asked = parser.parse_args(arguments)
    corpus = load_corpus(None, SEQUENCE)
    print(f"loss on the validation text after {asked.steps} steps, of seeds 0 to {asked.seeds - 1}")
    for kind in LOOPS:
        found = [loss_of(kind, corpus, asked.steps, seed) for seed in range(asked.seeds)]
        print(f"{kind:<22}", *(f"{loss:.4f}" for loss in found), f"mean {statistics.fmean(found):.4f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(2)  # their number changes the last digits
    main()
