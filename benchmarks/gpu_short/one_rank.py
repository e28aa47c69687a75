"""Section b: a step at world size 1, under all systems, which live in one process and step in turn.

    turn 1   plain x 10 | plain again x 10 | DDP x 10 | ... | zero 3 x 10
    turn 2   DDP x 10 | ...                                 each turn begins with another system

The plain loop runs twice, as two models: how much one differs from the other is the noise of every other ratio, and
whether their losses are equal says whether the model itself is deterministic.

Knows: steps of a GPT under a system, clocks. Does not know: how a system is made.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero.commands.train.model import GPT, INIT_STD, Shape, loss_fn

from ..systems import ON_A_DEVICE, PLAIN, How, Training
from .clock import Host, clock
from .job import Row, ShortJob

BILLION = Shape(24, 14, 1792, 50304)  # 1.0 billion parameters
TINY = Shape(2, 2, 32, 64)
AGAIN, SMALL_BUCKETS = "plain, again", "zero 2, 25 MiB"
TOKENS = (2048, 8192)
SEQUENCE, QUICK_SEQUENCE = 512, 16
WARM, IN_A_ROW, TURNS = 3, 10, 3
MARGIN = 4 << 30  # bytes that stay free beside what the first system needs


@dataclass
class Runner:
    """A model under a system."""

    name: str
    training: Training

    def step(self, tokens: Tensor) -> Tensor:
        """Run a step; return the loss."""
        loss = loss_fn(self.training.forward(tokens[:, :-1]), tokens[:, 1:])
        self.training.backward(loss)
        self.training.step()
        self.training.clear()
        return loss.detach()


def systems() -> dict[str, tuple[str, How]]:
    """Return the systems by the names of their rows."""
    default = How(None)
    rows = {PLAIN: (PLAIN, default), AGAIN: (PLAIN, default)}
    rows |= {name: (name, default) for name in ON_A_DEVICE if name != PLAIN}
    return rows | {SMALL_BUCKETS: ("zero 2", How(25.0))}


def model_of(job: ShortJob) -> nn.Module:
    """Build the model in bf16, with the same weights at each call."""
    shape, sequence = (TINY, QUICK_SEQUENCE) if job.quick else (BILLION, SEQUENCE)
    torch.manual_seed(0)
    with torch.device(job.device):
        model = GPT(shape, sequence)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, INIT_STD)
    return model.to(torch.bfloat16)


def tokens_of(job: ShortJob, count: int) -> Tensor:
    """Return sequences of so many tokens, on the device, so that a step copies none."""
    shape, sequence = (TINY, QUICK_SEQUENCE) if job.quick else (BILLION, SEQUENCE)
    generator = torch.Generator().manual_seed(0)
    rows = max(1, count // sequence) if not job.quick else 2
    return torch.randint(shape.vocabulary, (rows, sequence + 1), generator=generator).to(job.device)


def measure(job: ShortJob) -> Iterator[Row]:
    """Yield a row for each turn of a system, by the number of tokens."""
    timer = clock(job.device)
    join_alone(timer)
    try:
        yield from _turns(job, timer)
    finally:
        gc.unfreeze()
        gc.collect()
        dist.destroy_process_group()


def join_alone(timer: Host) -> None:
    """Make the default process group of this process alone."""
    store: Any = dist.HashStore()  # type: ignore[attr-defined] # torch does not list it
    dist.init_process_group(timer.backend, store=store, rank=0, world_size=1)


def _turns(job: ShortJob, timer: Host) -> Iterator[Row]:
    runners, needed = list[Runner](), 0
    for name, (system, how) in systems().items():
        before = timer.held()
        if timer.free() < 2 * needed + MARGIN and not job.quick:
            yield {"no_room": name, "needed": 2 * needed + MARGIN, "free": timer.free()}
            continue
        runner = Runner(name, ON_A_DEVICE[system].build(model_of(job), how))
        for _ in range(WARM):
            runner.step(tokens_of(job, TOKENS[0]))
        runners.append(runner)
        needed = max(needed, timer.held() - before)
    gc.collect()
    gc.freeze()  # so that Python does not search the objects of all systems in the steps of one
    for tokens, turn in itertools.product(TOKENS[:1] if job.quick else TOKENS, range(1 if job.quick else TURNS)):
        batch = tokens_of(job, tokens)
        for runner in (*runners[2 * turn :], *runners[: 2 * turn]):
            yield {"tokens": tokens, "turn": turn, "system": runner.name, **_turn(runner, timer, batch, job.quick)}


def _turn(runner: Runner, timer: Host, batch: Tensor, quick: bool) -> Row:
    """Run steps in a row, after one that does not count, and return what one took."""
    steps = 2 if quick else IN_A_ROW
    runner.step(batch)
    timer.finish()
    begin, started = time.perf_counter(), timer.processor_time()
    for _ in range(steps):
        loss = runner.step(batch)
    processor = timer.processor_time() - started
    timer.finish()
    in_a_row = time.perf_counter() - begin
    return {
        "in_a_row": in_a_row / steps,
        "processor": processor / steps,
        "buckets": runner.training.buckets() if runner.name.startswith("zero") else 0,
        "loss": float(loss),
    }
