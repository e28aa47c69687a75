"""A checkpoint forgets the topology: the same bytes from every one, and training goes on at every other."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st

from collectives import Transport, on_threads
from zero import MixedPrecision, ZeroOptimizer, load, open_checkpoint, save

from ..support.models import build
from ..support.pool import GlooPool
from ..support.programs import locked_build
from .runs import BF16, Class, Topology, content, digests_of, optimizer_of, run, step_folder, take_steps

pytestmark = pytest.mark.contract

SGD = Class(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
PLAIN_SGD = Class(torch.optim.SGD, {"lr": 0.1})
NADAM = Class(torch.optim.NAdam, {"lr": 0.01})
ADAGRAD = Class(torch.optim.Adagrad, {"lr": 0.01})
TENSOR_RATE = Class(torch.optim.AdamW, {"lr": torch.tensor(0.01), "amsgrad": True})
FP16 = MixedPrecision(torch.float16, buffer_dtype=torch.float16)
SMALL = 0.0005
DISK = Path("offload")
COLLECTIVES = ("pairwise", "shared", "hierarchical")  # those that add up in the order of the ranks, on threads


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoint of two steps on one rank at stage 0."""
    folder = tmp_path_factory.mktemp("reference")
    run(folder, Topology(asynchronous=False), 2)
    return folder


@pytest.mark.parametrize(
    "topology",
    [
        Topology(1, 3, SMALL),
        Topology(2, 0, SMALL),
        Topology(2, 1, SMALL, asynchronous=False),
        Topology(2, 3, SMALL),
        Topology(3, 2, SMALL),
        Topology(4, 3, 25.0),
        Topology(4, 2, SMALL, factor=2),
        Topology(6, 1, SMALL),
        Topology(6, 3, SMALL, factor=3),
        Topology(2, 2, SMALL, offload=DISK),
        Topology(2, 3, SMALL, offload=DISK),
        *(Topology(3, 1 + number % 3, SMALL, collective=name) for number, name in enumerate(COLLECTIVES)),
    ],
    ids=str,
)
@pytest.mark.by_default(
    *("2-stage0-0.0005MiB", "3-stage2-0.0005MiB", "6of3-stage3-0.0005MiB", "2-stage2-0.0005MiB-offload"),
    "3-stage1-0.0005MiB-pairwise",
)
def test_every_topology_writes_the_same_bytes(topology: Topology, reference: Path, tmp_path: Path) -> None:
    run(tmp_path / "run", topology.below(tmp_path), 2)
    assert digests_of(tmp_path / "run", 2) == digests_of(reference, 2)
    assert content(tmp_path / "run", 2) == content(reference, 2)


@pytest.mark.parametrize(
    "of", [SGD, PLAIN_SGD, NADAM, ADAGRAD, TENSOR_RATE], ids=["sgd", "plain", "nadam", "adagrad", "tensor"]
)
@pytest.mark.parametrize("precision", [None, BF16, FP16], ids=["fp32", "bf16", "fp16"])
def test_every_class_and_precision_has_one_content_and_goes_on(
    of: Class, precision: MixedPrecision | None, tmp_path: Path
) -> None:
    alone = run(tmp_path / "alone", Topology(precision=precision), 3, of)
    run(tmp_path / "run", Topology(2, 3, SMALL, precision=precision), 1, of)
    assert run(tmp_path / "run", Topology(3, 1, SMALL, precision=precision), 2, of) == alone
    assert digests_of(tmp_path / "run", 3) == digests_of(tmp_path / "alone", 3)


class Counting(torch.optim.Optimizer):
    """Divides a gradient by the number of a parameter's updates, which is a plain number in its state."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    parameter.add_(parameter.grad / state["count"], alpha=-group["lr"])


def test_states_that_are_no_tensors_come_back(tmp_path: Path) -> None:
    of = Class(Counting, {"lr": 0.1})
    alone = run(tmp_path / "alone", Topology(), 3, of)
    run(tmp_path / "run", Topology(2, 3, SMALL), 1, of)
    assert run(tmp_path / "run", Topology(3, 1, SMALL), 2, of) == alone
    assert digests_of(tmp_path / "run", 3) == digests_of(tmp_path / "alone", 3)
    states = open_checkpoint(step_folder(tmp_path / "run", 3)).optimizer_state_dict()["state"]
    assert {value for state in states.values() for value in state.values()} <= {1, 2, 3}
    assert len(states) > 3


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    world_size, stage = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    factors = [number for number in range(1, world_size) if world_size % number == 0] if stage else []
    return Topology(
        world_size,
        stage,
        draw(st.sampled_from([SMALL, 0.002, 25.0])),
        draw(st.sampled_from([None, *factors])),
        draw(st.booleans()),
        draw(st.sampled_from([None, DISK])),
        collective=draw(st.sampled_from(["auto", *COLLECTIVES])),
    )


@pytest.mark.parametrize("stage", [1, 3])
def test_any_number_of_ranks_loads_a_checkpoint_and_saves_it_again(stage: int, reference: Path, tmp_path: Path) -> None:
    """Also 5 ranks, which cannot take equally many of 12 micro-batches, and a ring, which trains other bits."""

    def program(transport: Transport) -> str:
        topology = Topology(5, stage, SMALL, collective="ring")
        optimizer = optimizer_of(locked_build(1), transport, topology, Class())
        load(step_folder(reference, 2), optimizer, rng=False)
        return save(tmp_path / "again", optimizer, step=2).result()

    assert set(on_threads(5, program)) == {content(reference, 2)}


@settings(max_examples=max(3, settings().max_examples // 4))  # each trains three times
@given(before=topologies(), after=topologies(), steps=st.integers(0, 2))
@example(Topology(3, 1, SMALL), Topology(4, 2, SMALL, factor=2, offload=DISK), 1)
@example(Topology(4, 3, SMALL, factor=1), Topology(4, 3, 0.002, factor=2, offload=DISK), 1)
@pytest.mark.timeout(600)
def test_training_goes_on_at_any_topology_as_if_undisturbed(before: Topology, after: Topology, steps: int) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        whole = run(folder / "whole", Topology(), steps + 1)
        run(folder / "parts", before.below(folder / "before"), steps)
        assert run(folder / "parts", after.below(folder / "after"), 1) == whole
        assert digests_of(folder / "parts", steps + 1) == digests_of(folder / "whole", steps + 1)


@pytest.mark.parametrize(
    ("first", "second"), [(None, BF16), (BF16, None), (BF16, FP16)], ids=["fp32-bf16", "bf16-fp32", "bf16-fp16"]
)
def test_another_precision_begins_with_the_widest_weights(
    first: MixedPrecision | None, second: MixedPrecision | None, tmp_path: Path
) -> None:
    run(tmp_path / "run", Topology(2, 2, SMALL, precision=first), 2)
    found = []
    for topology in (
        Topology(precision=second),
        Topology(3, 3, SMALL, precision=second),
        Topology(2, 0, precision=second),
    ):
        folder = tmp_path / str(topology)
        shutil.copytree(tmp_path / "run", folder)
        found.append((run(folder, topology, 1), content(folder, 3)))
    assert found[0] == found[1] == found[2]
    saved, model = open_checkpoint(step_folder(tmp_path / "run", 2)), build(0)
    widest = saved.masters() or saved.model_state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(widest.get(name, saved.model_state_dict()[name]))
        model.offset.copy_(saved.model_state_dict()["offset"])
    optimizer = ZeroOptimizer(model, lr=1e-2, mixed_precision=second, divisor=12)
    states = saved.optimizer_state_dict()
    names = [name for group in states["param_groups"] for name in group["param_names"]]
    states["masters"] = (
        {i: widest[name] for i, name in enumerate(names) if name in widest} if second is not None else {}
    )
    optimizer.load_state_dict(states)
    take_steps(model, optimizer, 2, 1)
    assert optimizer.check_replicas() == found[0][0], "loaded: constructed at this precision from the wide weights"


def _process(group: dist.ProcessGroup, rank: int, stage: int, path: str, steps: int, first: int) -> str:
    model = build(0)
    optimizer = ZeroOptimizer(model, stage=stage, process_group=group, bucket_cap_mb=SMALL, lr=1e-2, divisor=12)
    if first:
        restored = load(f"{path}/{first}", optimizer)
        assert restored.step == first
    take_steps(model, optimizer, first, steps)
    save(f"{path}/{first + steps}", optimizer, step=first + steps)
    digest = optimizer.check_replicas()
    optimizer.close()
    return digest


def test_processes_save_and_load_at_other_stages_and_numbers(gloo: GlooPool, reference: Path, tmp_path: Path) -> None:
    gloo.run(_process, 3, str(tmp_path), 2, 0, ranks=(0, 1, 2))
    found = open_checkpoint(tmp_path / "2")
    found.verify()
    assert found.content == content(reference, 2)
    digests = gloo.run(_process, 2, str(tmp_path), 1, 2, ranks=(0, 1))
    shutil.copytree(reference, tmp_path / "alone")
    assert set(digests) == {run(tmp_path / "alone", Topology(), 1)}
    assert open_checkpoint(tmp_path / "3").content == content(tmp_path / "alone", 3)
