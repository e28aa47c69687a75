"""The steps of `zero train` on one rank, with their losses, times and bytes.

Knows: micro-batches, and the order backward - clip - step - zero_grad - save. Does not know: how ranks are started, or
how results are printed. Each rank keeps the losses of its own micro-batches. At logging time, and before a save, the
ranks exchange them and put them into the order of the micro-batches, so that a loss has the same bits for every number
of ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from ... import ZeroOptimizer
from ..console import Console, StepStats
from ..runner import StoppedError
from .data import Batch, Corpus
from .memory_stats import bytes_by_kind, live_storages, proportional_set_size
from .model import loss_fn
from .report import RankFacts
from .saves import Saves
from .settings import TrainConfig

__all__ = ["Loop", "validate"]

LOGS_PER_RUN = 100


class Stopwatch:
    """The time spent inside its `with` blocks since the last `lap`."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds += time.perf_counter() - self._start

    def lap(self) -> float:
        """Seconds since the last lap."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


@dataclass(frozen=True)
class Observation:
    """Bytes of the live storages of this process at one moment, by kind."""

    kinds: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.kinds.values())


class Loop:
    """The training of one rank. After `run`, ``losses`` (nats per byte, over all ranks) has an entry for each step of
    the run, and ``step_ms`` for each that was taken here, not before a checkpoint."""

    def __init__(
        self,
        config: TrainConfig,
        corpus: Corpus,
        model: nn.Module,
        optimizer: ZeroOptimizer,
        console: Console | None,
        saves: Saves,
    ) -> None:
        self.losses: list[float] = []
        self.step_ms: list[float] = []
        self._config, self._corpus, self._console = config, corpus, console
        self._model, self._optimizer, self._saves = model, optimizer, saves
        self._mine = range(optimizer.rank, config.micro_batches, optimizer.world_size)
        self._stopwatch = Stopwatch()
        self._unshared: list[list[float]] = []
        self._logged = 0  # steps whose losses were logged
        self._scaler = torch.amp.GradScaler("cpu", enabled=config.precision == "fp16")
        self._scaler.scale(torch.zeros(1))  # a rank without a micro-batch scales nothing, and a scaler begins with that

    def run(self) -> RankFacts:
        """Take all steps that a checkpoint does not have yet. Return the measurements of this rank in the last one, or
        now if there is none left. All ranks must call it."""
        self._optimizer.divisor = self._config.micro_batches
        begin = self._resume()
        if begin == self._config.steps:
            now = self._observe()
            return self._facts(now, now, payload=0, control=0)
        every = max(1, self._config.steps // LOGS_PER_RUN)
        for step in range(begin, self._config.steps - 1):
            self._step(step, log=(step + 1) % every == 0)
        return self._last_step(self._config.steps - 1)

    def _resume(self) -> int:
        """Go on from a checkpoint, if ``--resume`` names one. Return the number of steps that were taken before."""
        found = self._saves.resume(self._scaler)
        self.losses += found.losses
        self._logged = found.step
        if self._console is not None:
            for line in found.lines:
                self._console.line(line)
            if found.step:
                ranks = self._optimizer.world_size
                self._console.line(f"goes on from step {found.step} on {ranks} rank{'s' if ranks > 1 else ''}")
        return found.step

    def _step(self, step: int, *, log: bool) -> None:
        with self._stopwatch:
            self._accumulate(step)
            self._update()
        held = self._observe().total if log and self._console is not None else 0
        self._clear()
        if log:
            self._log(held)
        self._save(step + 1)

    def _last_step(self, step: int) -> RankFacts:
        """Take a step and measure storages and traffic between its parts."""
        before = self._optimizer.traffic
        with self._stopwatch:
            self._accumulate(step)
        after_backward = self._observe()
        with self._stopwatch:
            self._update()
        after_step = self._observe()
        after = self._optimizer.traffic
        facts = self._facts(
            after_backward,
            after_step,
            payload=after.payload_sent - before.payload_sent,
            control=after.control_sent - before.control_sent,
        )
        self._clear()
        self._log(after_step.total)
        self._save(step + 1)
        return facts

    def _accumulate(self, step: int) -> None:
        config = self._config
        losses = []
        with self._turns():
            for index in self._mine:
                data = self._corpus.micro_batch(config.seed, step, index, config.batch, config.sequence)
                loss = loss_fn(self._model(data.inputs), data.targets)
                self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                losses.append(loss.item())
        self._unshared.append(losses)

    def _turns(self) -> AbstractContextManager[None]:
        """Return the context of a step's backwards, in which a rank that has fewer micro-batches takes its turns.

        It does so by itself in clip and step, but at stage 3 others may gather units in their last forward, and a
        scaler, which comes before, fails on a rank without a gradient.
        """
        uneven = self._config.micro_batches % self._optimizer.world_size != 0
        needed = self._config.stage == 3 or self._config.precision == "fp16"
        return self._optimizer.join() if uneven and needed else nullcontext()

    def _update(self) -> None:
        self._scaler.unscale_(self._optimizer)
        if self._config.clip is not None:
            self._optimizer.clip_grad_norm_(self._config.clip)
        self._scaler.step(self._optimizer)
        self._scaler.update()

    def _clear(self) -> None:
        with self._stopwatch:
            self._optimizer.zero_grad()
        self.step_ms.append(1000 * self._stopwatch.lap())

    def _observe(self) -> Observation:
        found = bytes_by_kind(live_storages(), self._optimizer.describe().storages)
        del found["common"]  # the owner of a slice counts it
        return Observation(found)

    def _facts(self, after_backward: Observation, after_step: Observation, payload: int, control: int) -> RankFacts:
        """Combine the two observations. Peaks inside a backward are those that the library itself reports."""
        description = self._optimizer.describe()
        seen = max(after_backward.kinds["scratch"], after_step.kinds["scratch"])
        return RankFacts(
            rank=self._optimizer.rank,
            measured={
                "parameters": after_backward.kinds["parameters"],
                "gradients": after_backward.kinds["gradients"],
                "optimizer": after_step.kinds["optimizer"],
                "gathered_peak": description.bytes["gathered_peak"],
                "scratch_peak": max(seen, description.bytes["scratch_peak"]),
            },
            formula=dict(description.formula_bytes),
            other=after_backward.kinds["other"],
            live=after_backward.total,
            pss=proportional_set_size(),
            payload_sent=payload,
            control_sent=control,
        )

    def _save(self, steps: int) -> None:
        """Save if a checkpoint is due, or if a signal asks some rank to end; then raise `StoppedError`, unless this was
        the last step."""
        why = self._saves.stop_requested
        if why is not None or self._saves.due(steps):
            self._share_losses()
            self._saves.save(steps, self.losses, self._scaler, blocking=why is not None)
        if why is not None and steps < self._config.steps:
            raise StoppedError(f"{why}: all ranks have saved step {steps} and end; --resume auto goes on")

    def _log(self, held: int) -> None:
        """Share the losses, and print the newest one."""
        self._share_losses()
        steps, self._logged = len(self.losses) - self._logged, len(self.losses)
        if self._console is not None:
            seconds = sum(self.step_ms[-steps:]) / 1000
            tokens = steps * self._config.micro_batches * self._config.batch * self._config.sequence
            self._console.advance(StepStats(len(self.losses), self.losses[-1], tokens / seconds, held))

    def _share_losses(self) -> None:
        """Exchange the losses of the steps since the last call, and form their means."""
        if not self._unshared:
            return
        world, steps = self._optimizer.world_size, len(self._unshared)
        parts = self._optimizer.exchange(np.array(self._unshared, dtype="<f8").tobytes())
        self._unshared.clear()
        in_order = np.empty((steps, self._config.micro_batches))
        for rank, part in enumerate(parts):
            in_order[:, rank::world] = np.frombuffer(part, dtype="<f8").reshape(steps, -1)
        self.losses += [math.fsum(step) / len(step) for step in in_order.tolist()]


@torch.no_grad()
def validate(model: nn.Module, optimizer: ZeroOptimizer, batches: Sequence[Batch]) -> float:
    """Bits per byte over all batches, shared among the ranks; the same bits on every rank, for every number of ranks.

    Every rank runs the model equally often (a rank without a batch of its own repeats one), since a forward may be
    a collective.
    """
    world = optimizer.world_size
    rounds = math.ceil(len(batches) / world)
    mine = [batches[(turn * world + optimizer.rank) % len(batches)] for turn in range(rounds)]
    nats = np.array([loss_fn(model(batch.inputs), batch.targets).item() * batch.targets.numel() for batch in mine])
    parts = [np.frombuffer(data, dtype="<f8") for data in optimizer.exchange(nats.astype("<f8").tobytes())]
    in_order = np.stack(parts, axis=-1).reshape(-1)[: len(batches)]
    return math.fsum(in_order.tolist()) / sum(batch.targets.numel() for batch in batches) / math.log(2)
