"""One rank that trains, and the records of its job and of its result.

It runs all steps of its job and prints its `Trained` as a line of JSON, or, in turn with other systems, runs a step for
each line of its input and prints the seconds of that step.

Knows: steps, clocks, memory of this process. Does not know: its parent process, or the other ranks' results. Started as
`python -m benchmarks.step_rank JOB MEETING PARENT`, with RANK and WORLD_SIZE set.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .dials import DIALS
from .models import trainable
from .rank import as_rank, forget_peak, live_storages, proportional_set_size, resident
from .systems import SYSTEMS, How, System, Training

KNOWN: dict[str, System] = SYSTEMS | DIALS
CAP_MB = 25.0  # MiB of a bucket, the default of DistributedDataParallel


@dataclass(frozen=True)
class StepJob:
    """A training of ``model`` under ``system``: ``warm`` steps, and ``steps`` timed steps.

    ``narrow``: train in bf16. ``muon``: with Muon for the matrices of blocks. ``in_turn``: each step waits for a line.
    """

    system: str
    model: str
    warm: int
    steps: int
    narrow: bool = False
    muon: bool = False
    in_turn: bool = False
    micro_batches: int = 1
    timeout: float = 300.0

    def to_json(self) -> str:
        """Return the job for a process, perhaps of an older tree, which does not know all that has a default."""
        fields = {field.name: (getattr(self, field.name), field.default) for field in dataclasses.fields(self)}
        return json.dumps({name: value for name, (value, default) in fields.items() if value != default})


@dataclass(frozen=True)
class Trained:
    """The result of one rank of one run.

    ``seconds``: of each timed step. Bytes of this rank between a backward and the step: ``parameters``, ``gradients``
    (with all that the system keeps for them) and ``states``. ``peak``: the most resident bytes of the process above its
    start. ``proportional``: bytes of the process after the last step, where a page that n processes share counts 1/n.
    ``loss``: of the last step; None if the system does not train.
    """

    seconds: list[float]
    loss: float | None
    parameters: int
    gradients: int
    states: int
    peak: int
    proportional: int


class Steps:
    """A model under the system of a job. All ranks must make each call."""

    def __init__(self, job: StepJob) -> None:
        self._model = trainable(job.model)
        self._generator = torch.Generator().manual_seed(dist.get_rank())
        self._micro_batches = job.micro_batches
        self.training: Training = KNOWN[job.system].build(self._model.build(), How(CAP_MB, job.narrow, job.muon))
        self.loss = torch.zeros(())

    def backward(self) -> None:
        """Run a forward and a backward."""
        inputs, targets = self._model.batch(self._generator)
        self.loss = self._model.loss(self.training.forward(inputs), targets)
        self.training.backward(self.loss)

    def seconds(self, number: int) -> Iterator[float]:
        """Take steps, and yield the seconds of each."""
        for _ in range(number):
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(self._micro_batches):
                self.backward()
            self.training.step()
            self.training.clear()
            yield time.perf_counter() - begin


def train(job: StepJob) -> Trained:
    """Run the steps, and measure what is held after a further backward."""
    forget_peak()  # the imports have raised it
    if KNOWN[job.system].needs:
        importlib.import_module(KNOWN[job.system].needs)
    start, before = resident("VmRSS"), live_storages()
    steps = Steps(job)
    seconds = list(steps.seconds(job.warm + job.steps))[job.warm :]
    peak, loss = resident("VmHWM") - start, steps.loss.item() if steps.training.learns else None
    steps.backward()
    held = _held(steps.training, live_storages, before)
    proportional = proportional_set_size() or 0
    dist.barrier()  # when a rank ends, its share of the pages of libraries counts in the others
    return Trained(seconds, loss, *held, peak, proportional)


def _held(training: Training, live: Callable[[], dict[int, int]], before: dict[int, int]) -> tuple[int, int, int]:
    """Return the bytes of parameters, of gradients (all storages that did not exist ``before``), and of states."""
    gc.collect()
    parameters, states = _bytes(training.parameters()), _bytes(training.states())
    known = training.common() | before.keys()
    rest = sum(size for address, size in live().items() if address not in known) - parameters - states
    return parameters, rest, states


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}.values())


def main(arguments: Sequence[str]) -> None:
    job, meeting, parent = StepJob(**json.loads(arguments[0])), arguments[1], int(arguments[2])
    with as_rank(meeting, job.timeout, parent):
        if not job.in_turn:
            print(json.dumps(asdict(train(job))), flush=True)
            return
        steps = Steps(job)
        for _ in sys.stdin:
            (seconds,) = steps.seconds(1)
            print(json.dumps([seconds, steps.loss.item()]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
