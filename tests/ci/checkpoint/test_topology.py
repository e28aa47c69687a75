"""Further topologies, classes and precisions write one checkpoint, and training goes on from it."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from collectives import Transport, on_threads
from zero import load, save

from ...checkpoint.goes_on import goes_on, undisturbed, widest_first
from ...checkpoint.runs import BF16, FP16, SMALL, UNITS, Class, Topology, content, optimizer_of, run, step_folder
from ...support.programs import locked_build

DISK = Path("offload")
COLLECTIVES = ("pairwise", "shared", "hierarchical")  # those that add up in the order of the ranks, on threads
CLASSES = {
    "bf16-plain": (Class(torch.optim.SGD, {"lr": 0.1}), BF16),
    "fp16-nadam": (Class(torch.optim.NAdam, {"lr": 0.01}), FP16),
    "fp32-adagrad": (Class(torch.optim.Adagrad, {"lr": 0.01}), None),
    "fp16-tensor": (Class(torch.optim.AdamW, {"lr": torch.tensor(0.01), "amsgrad": True}), FP16),
}


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_and_precision_has_one_content_and_goes_on(name: str, tmp_path: Path) -> None:
    goes_on(*CLASSES[name], tmp_path)


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
        units=draw(st.sampled_from(["", *UNITS])) if stage == 3 else "",
    )


@settings(max_examples=max(3, settings().max_examples // 4))  # each trains three times
@given(before=topologies(), after=topologies(), steps=st.integers(0, 2))
@example(Topology(3, 1, SMALL), Topology(4, 2, SMALL, factor=2, offload=DISK), 1)
@example(Topology(3, 3, SMALL, units="inside units"), Topology(2, 3, 25.0, units="kept inside units"), 1)
@example(Topology(4, 3, SMALL, factor=1), Topology(4, 2, 0.002, factor=2, offload=DISK), 1)
@pytest.mark.timeout(600)
def test_training_goes_on_at_any_topology_as_if_undisturbed(before: Topology, after: Topology, steps: int) -> None:
    with TemporaryDirectory() as name:
        undisturbed(before, after, steps, Path(name))


def test_any_number_of_ranks_loads_a_checkpoint_and_saves_it_again(tmp_path: Path) -> None:
    """Also 5 ranks, which cannot take equally many of 12 micro-batches, and a ring, which trains other bits."""
    run(tmp_path, Topology(asynchronous=False), 2)

    def program(transport: Transport) -> str:
        topology = Topology(5, 3, SMALL, collective="ring")
        optimizer = optimizer_of(locked_build(1), transport, topology, Class())
        load(step_folder(tmp_path, 2), optimizer, rng=False)
        return save(tmp_path / "again", optimizer, step=2).result()

    assert set(on_threads(5, program)) == {content(tmp_path, 2)}


def test_another_precision_begins_with_the_widest_weights(tmp_path: Path) -> None:
    widest_first(None, BF16, tmp_path)
