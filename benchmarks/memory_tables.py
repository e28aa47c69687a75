"""Tables of the memory of ranks, beside the formulas.

The formulas are those of Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
(2020), section 5, for fp32 and Adam: 4 bytes a parameter for parameters, 4 for gradients, 8 for states, each divided by
the number of ranks if the stage shards it.

Knows: runs, stages by number. Does not know: how anything was measured.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import torch

from zero.commands.train.model import GPT

from .step_job import MODELS, Held
from .systems import SYSTEMS, smallest_peer
from .tables import Table

KINDS = {"parameters": 4, "gradients": 4, "states": 8}
MOST = 1.01  # times the formula
SHARDED_FROM = {"parameters": 3, "gradients": 2, "states": 1}  # the first stage that shards a kind


@functools.cache
def numel(model: str) -> int:
    """Return the number of elements of a model's parameters."""
    with torch.device("meta"):
        made = GPT(MODELS[model].shape, MODELS[model].sequence)
    return sum(parameter.numel() for parameter in made.parameters())


def formula(kind: str, stage: int, elements: int, world_size: int) -> float:
    """Return the bytes of a rank."""
    return KINDS[kind] * elements / (world_size if stage >= SHARDED_FROM[kind] else 1)


def by_ranks(runs: Sequence[Held]) -> Iterator[Table]:
    """Yield a table for each number of ranks: megabytes of the largest rank."""
    columns = ["system", "stage", *(f"{kind} MB (÷ formula)" for kind in KINDS), "peak MB", "job's PSS MB"]
    for world_size, group in itertools.groupby(runs, key=lambda run: run.ranks):
        rows = [_row(run) for run in group]
        yield Table(f"{runs[0].model}, {world_size} ranks", columns, rows)


def _row(run: Held) -> list[str]:
    stage = SYSTEMS[run.system].stage
    assert stage is not None, "systems without a stage are not measured here"
    cells = [f"{getattr(run, kind) / 1e6:.1f} ({_over_formula(run, kind, stage):.2f})" for kind in KINDS]
    return [run.system, str(stage), *cells, f"{run.peak / 1e6:.0f}", f"{run.proportional / 1e6:.0f}"]


def targets(runs: Sequence[Held]) -> Table:
    """Make a table of the targets and the measured values."""
    rows = []
    for world_size, group in itertools.groupby(runs, key=lambda run: run.ranks):
        found = {run.system: run for run in group}
        for stage in range(4):
            ours = found.get(f"zero {stage}")
            if ours is None:
                continue
            worst, kind = max(
                (_over_formula(ours, kind, stage) / _more(kind, stage, world_size), kind) for kind in KINDS
            )
            measure = f"zero {stage}: bytes ÷ formula, {kind}"
            rows.append([measure, str(world_size), f"≤ {MOST}", f"{worst:.3f}", "yes" if worst <= MOST else "no"])
            jobs = {name: run.proportional for name, run in found.items()}
            least = smallest_peer(stage, jobs)
            if least is not None:
                ratio = ours.proportional / jobs[least]
                measure = f"zero {stage}: job's PSS ÷ {least}"
                rows.append([measure, str(world_size), "< 1", f"{ratio:.3f}", "yes" if ratio < 1 else "no"])
    return Table("What must be seen", ["measure", "ranks", "target", "measured", "met"], rows)


def _more(kind: str, stage: int, world_size: int) -> float:
    """Return the expected ratio to the formula.

    It is above 1 for gradients at stage 0, where a rank keeps the undivided sum of its own slices beside the mean.
    """
    return 1 + 1 / world_size if (kind, stage) == ("gradients", 0) else 1.0


def _over_formula(run: Held, kind: str, stage: int) -> float:
    return float(getattr(run, kind) / formula(kind, stage, numel(run.model), run.ranks))
