"""The job of a rank, its result, and the summary of all ranks' results, as plain values for JSON; and the models.

Knows: fields, shapes. Does not know: systems, processes, tables.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from zero.commands.train.model import Shape

CAP_MB = 25.0  # MiB of a bucket, the default of DistributedDataParallel


@dataclass(frozen=True)
class Model:
    """A GPT, and a rank's batch in a step: ``batch`` sequences of ``sequence`` tokens."""

    name: str
    shape: Shape
    batch: int
    sequence: int
    says: str
    bound: str


MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        Model("compute", Shape(6, 4, 256), 8, 128, "much work for each parameter", "compute"),
        Model("wide", Shape(4, 8, 768), 1, 32, "one sequence a rank: little work for each parameter", "communication"),
        Model("deep", Shape(48, 4, 64), 1, 32, "many small tensors", "communication"),
        Model("embedding", Shape(2, 4, 256, 32768), 1, 64, "most parameters in one tensor", "communication"),
    )
}


@dataclass(frozen=True)
class StepJob:
    """A training of ``model`` under ``system``: ``warm`` steps, and ``steps`` timed steps.

    ``bucket_cap_mb``: MiB, for systems with an option like that of DistributedDataParallel. ``narrow``: train in bf16.
    ``muon``: with Muon for the matrices of blocks.
    """

    system: str
    model: str
    warm: int
    steps: int
    timeout: float = 120.0
    bucket_cap_mb: float = CAP_MB
    narrow: bool = False
    muon: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> StepJob:
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Asked:
    """A request for ranks.

    ``kind``: the name of the job's class; ``job``: as JSON; ``meeting``: the file of their rendezvous. Rank r writes to
    ``said(r)``.
    """

    kind: str
    job: str
    world_size: int
    meeting: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def said(self, rank: int) -> Path:
        return Path(f"{self.meeting}-rank{rank}")


@dataclass(frozen=True)
class Trained:
    """The result of one rank of one run.

    ``seconds``: of each timed step. Bytes of this rank between a backward and the step: ``parameters``, ``gradients``
    (with all that the system keeps for them) and ``states``. ``peak``: the most resident bytes of the process above its
    start. ``proportional``: bytes of the process after the last step, where a page that n processes share counts 1/n.
    ``loss``: of the last step; None if the system does not train. ``buckets``: the number of buckets of its gradients.
    ``bus``: seconds in which all ranks at once copy as many bytes as a step receives. These two are 0 if the system
    does not report them. ``update``: seconds of the processor in the optimizer's ``step``, the median over steps.
    """

    system: str
    model: str
    rank: int
    seconds: list[float]
    loss: float | None
    parameters: int
    gradients: int
    states: int
    peak: int
    proportional: int
    buckets: int = 0
    bus: float = 0.0
    update: float = 0.0


def seconds_of_a_step(ranks: Sequence[Trained]) -> float:
    """Return the median over steps of the slowest rank's seconds."""
    return float(median(map(max, zip(*(rank.seconds for rank in ranks), strict=True))))


@dataclass(frozen=True)
class Held:
    """The memory of one run of ``ranks`` processes, in bytes.

    ``parameters``, ``gradients``, ``states``, ``peak``: the largest value of any rank. ``proportional``: the sum over
    ranks.
    """

    system: str
    model: str
    ranks: int
    parameters: int
    gradients: int
    states: int
    peak: int
    proportional: int

    @classmethod
    def of(cls, ranks: Sequence[Trained]) -> Held:
        return cls(
            ranks[0].system,
            ranks[0].model,
            len(ranks),
            max(rank.parameters for rank in ranks),
            max(rank.gradients for rank in ranks),
            max(rank.states for rank in ranks),
            max(rank.peak for rank in ranks),
            sum(rank.proportional for rank in ranks),
        )


@dataclass(frozen=True)
class Run(Held):
    """The memory and the time of one run.

    ``seconds``: of a step (`seconds_of_a_step`). ``loss``: that of rank 0. ``bus``: seconds in which the slowest rank
    copies the bytes that it receives in a step. ``update``: seconds of the processor in the optimizer's ``step``, of
    the rank that has most. ``muon``: as in `StepJob`.
    """

    seconds: float
    loss: float | None
    bus: float
    update: float = 0.0
    muon: bool = False

    @classmethod
    def of(cls, ranks: Sequence[Trained], *, muon: bool = False) -> Run:
        bus = max(rank.bus for rank in ranks)
        held = asdict(Held.of(ranks))
        update = max(rank.update for rank in ranks)
        return cls(**held, seconds=seconds_of_a_step(ranks), loss=ranks[0].loss, bus=bus, update=update, muon=muon)
