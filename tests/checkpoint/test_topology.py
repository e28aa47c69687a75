"""Every topology writes the same checkpoint, and training goes on at any other as if undisturbed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ..support.by_module import BY_MODULE
from ..support.rows import rows, without
from .goes_on import goes_on
from .runs import BF16, FP16, SMALL, Class, Topology, content, digests_of, go_back_twice, open_checkpoint, run

DISK = Path("offload")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoint of two steps on one rank at stage 0."""
    folder = tmp_path_factory.mktemp("reference")
    run(folder, Topology(asynchronous=False), 2)
    return folder


@pytest.mark.parametrize(
    "topology",
    rows(
        [
            Topology(6, 3, SMALL, factor=3, units="kept inside units"),
            Topology(2, 2, SMALL, offload=DISK),
        ],
        [
            Topology(2, 0, SMALL),
            Topology(3, 2, SMALL),
            Topology(3, 1, SMALL, asynchronous=False, collective="pairwise"),
        ],
    ),
    ids=str,
)
def test_every_topology_writes_the_same_bytes(topology: Topology, reference: Path, tmp_path: Path) -> None:
    run(tmp_path / "run", topology.below(tmp_path), 2)
    assert digests_of(tmp_path / "run", 2) == digests_of(reference, 2)
    assert content(tmp_path / "run", 2) == content(reference, 2)


@pytest.mark.filterwarnings("ignore:.*is the newest checkpoint now")
@pytest.mark.parametrize(
    "topology", rows([], [Topology(3, 3, SMALL), Topology(2, 2, SMALL), Topology(), Topology(3, 1)])
)
def test_a_loop_that_goes_back_saves_every_second_step_again_with_the_same_content(
    topology: Topology, tmp_path: Path
) -> None:
    """Twice, at any topology, with an average; a run that then begins anew finds the newest of the last branch."""

    go_back_twice(tmp_path, topology)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000002", "step-00000004"]
    aside = [(found.step, found.content) for found in map(open_checkpoint, tmp_path.glob("abandoned-*"))]
    assert sorted(step for step, _ in aside) == [4, 4, 6, 6]
    assert len(set(aside)) == 2
    assert (4, content(tmp_path, 4)) in aside


class Counting(torch.optim.SGD):
    """Divides a gradient by the number of a parameter's updates, which is a plain number in its state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (each for group in self.param_groups for each in group["params"] if each.grad is not None):
            state = self.state[parameter]
            state["count"] = state.get("count", 0) + 1
            parameter.sub_(parameter.grad / state["count"], alpha=0.1)


CLASSES = {
    "fp16-sgd": (Class(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), FP16),
    "bf16-adagrad": (Class(torch.optim.Adagrad, {"lr": 0.01}), BF16),
    "by-module": (Class(), BY_MODULE["by kind"]),
    "fp32-nadam": (Class(torch.optim.NAdam, {"lr": 0.01}), None),
    "fp32-number": (Class(Counting), None),
}


@pytest.mark.parametrize("name", rows(["bf16-adagrad"], ["fp16-sgd"]))
@pytest.mark.usefixtures("accelerated")
def test_shards_without_parameters_beside_their_masters_have_one_content_and_go_on(name: str, tmp_path: Path) -> None:
    """Nor is the padding that makes shards even in any file."""
    of, precision = CLASSES[name]
    goes_on(of, precision, tmp_path)
    loaded = run(tmp_path / "run", Topology(3, 3, SMALL, precision=precision), 1, of)
    assert loaded == run(tmp_path / "alone", Topology(precision=precision), 1, of)
    assert digests_of(tmp_path / "run", 4) == digests_of(tmp_path / "alone", 4)


@pytest.mark.first(2)
@pytest.mark.parametrize("name", without(CLASSES, "bf16-adagrad", "fp32-number"))
def test_every_class_and_precision_has_one_content_and_goes_on(name: str, tmp_path: Path) -> None:
    goes_on(*CLASSES[name], tmp_path)
