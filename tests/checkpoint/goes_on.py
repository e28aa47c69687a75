"""What must hold of a training that is saved at one topology, or precision, and goes on at another."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from zero import ZeroOptimizer, open_checkpoint

from ..support.models import build
from .runs import SMALL, Class, Topology, content, digests_of, run, step_folder, take_steps


def goes_on(of: Class, precision: Any, folder: Path) -> None:
    """A training of this class has the bits, and the files, of one rank alone."""
    alone = run(folder / "alone", Topology(precision=precision), 3, of)
    run(folder / "run", Topology(2, 3, SMALL, precision=precision), 1, of)
    assert run(folder / "run", Topology(3, 1, SMALL, precision=precision), 2, of) == alone
    assert digests_of(folder / "run", 3) == digests_of(folder / "alone", 3)


def undisturbed(before: Topology, after: Topology, steps: int, folder: Path) -> None:
    """Steps at one topology, and one more at another, have the bits of all on one rank."""
    whole = run(folder / "whole", Topology(), steps + 1)
    run(folder / "parts", before.below(folder / "before"), steps)
    assert run(folder / "parts", after.below(folder / "after"), 1) == whole
    assert digests_of(folder / "parts", steps + 1) == digests_of(folder / "whole", steps + 1)


def widest_first(first: Any, second: Any, folder: Path) -> None:
    """Another precision begins with the widest weights: as if constructed from them."""
    run(folder / "run", Topology(2, 2, SMALL, precision=first), 2)
    found = []
    for topology in (Topology(precision=second), Topology(3, 3, SMALL, precision=second)):
        shutil.copytree(folder / "run", folder / str(topology))
        found.append((run(folder / str(topology), topology, 1), content(folder / str(topology), 3)))
    assert found[0] == found[1]
    saved, model = open_checkpoint(step_folder(folder / "run", 2)), build(0)
    widest = saved.masters() or saved.model_state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(widest.get(name, saved.model_state_dict()[name]))
        model.offset.copy_(saved.model_state_dict()["offset"])
    optimizer = ZeroOptimizer(model, lr=1e-2, mixed_precision=second, divisor=12)
    states = saved.optimizer_state_dict()
    names = [name for group in states["param_groups"] for name in group["param_names"]]
    states["masters"] = {} if second is None else {i: widest[name] for i, name in enumerate(names) if name in widest}
    optimizer.load_state_dict(states)
    take_steps(model, optimizer, 2, 1)
    assert optimizer.check_replicas() == found[0][0]
