"""`mesh=`: the plain loop's bits, errors by name, and checkpoints of models whose parts are on several ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from collectives import Transport, on_threads
from collectives.backends.device_mesh import MeshPlace
from zero import ZeroOptimizer
from zero.checkpoint.folder.model_parts import ModelParts

from ..dials.loops import step
from ..dials.record import config_with
from ..support.errors import assert_in_order, error_of
from ..support.limits import BOUND
from ..support.machine.program import Backward, Scaled
from ..support.machine.run import Played, run
from ..support.parts import parts_of
from ..support.plain import assert_same_bits
from ..support.pool import GlooPool
from ..support.rows import rows
from ..support.sides import AsPlain
from . import jobs
from .jobs import Whole, take_step

CLIPPED = [*step(1), Backward(2, sync=False), *step(3), Scaled(4, overflow=1)]


@pytest.mark.law("group ranks")
@pytest.mark.parametrize(
    ("stage", "ranks", "more"),
    rows(
        [(3, [[0, 2], [1, 3]], {})],
        [
            (2, [1, 3], {"precision": "bf16"}),
            (0, [[0, 2], [1, 3]], {}),
            (1, [[0], [3]], {}),
            (3, [[0, 2, 3]], {"precision": "bf16"}),
            (3, [0, 1, 2, 3], {"optimizer": "shampoo"}),
            (3, [[0, 2], [1, 3]], {"precision": "by kind", "units": "inside units, kept"}),
        ],
    ),
    ids=lambda value: str(value).replace(" ", "") if isinstance(value, (int, list)) else "-".join(value),
)
def test_a_mesh_of_any_ranks_has_the_bits_of_the_plain_loop(
    gloo: GlooPool, stage: int, ranks: Any, more: dict[str, Any]
) -> None:
    """Ranks are numbered row by row, whatever their numbers in the job; processes outside of it do nothing else."""
    members = torch.tensor(ranks).flatten().tolist()
    config = config_with({"stage": stage, "world_size": len(members), "mesh": True, **more})
    results = gloo.run(jobs.on_mesh, config, CLIPPED, ranks, ranks=range(4))
    assert [rank for rank, result in enumerate(results) if result is not None] == sorted(members)
    run(config, *CLIPPED, backend=Played([results[rank] for rank in members]))


def test_what_only_processes_of_a_mesh_can_give_is_refused_by_name(gloo: GlooPool) -> None:
    words = [
        "TypeError … 'weight' is a DTensor … to_local() … clip_grad_norm_(over=...) knows to be a part of a model",
        "ValueError … the mesh is for cpu, but parameters are on meta … or move the model to cpu first",
        "ValueError … the ranks have different meshes: rank 0 [[0, 2], [1, 3]], rank 1 [[0, 1], [2, 3]]",
    ]
    for errors in gloo.run(jobs.errors_of_meshes, ranks=range(4)):
        for expected, error in zip(words, errors, strict=True):
            assert_in_order(expected, error)


# -- checkpoints of parts ----------------------------------------------------------------------------------------------


def assert_resumed(results: list[Any], step: int) -> None:
    """Compare the parts that went on after a step with the undisturbed training of the whole model."""
    whole = Whole(2)
    side = AsPlain(whole, lambda updated: torch.optim.AdamW(updated, lr=0.1), 2)
    for number in range(step + 1):
        take_step(side, number)
    assert results[2:] == [None, None]
    for found, model, _ in results[:2]:
        assert found == step
        for name, parameter in model.named_parameters():
            assert_same_bits(parameter, whole.stages[0].get_parameter(name), name)


@pytest.mark.first(0)
def test_parts_are_saved_by_their_places_and_restored_together_at_another_data_parallel_size(
    gloo: GlooPool, tmp_path: Path
) -> None:
    for found in gloo.run(jobs.save_parts, tmp_path, 3, ranks=range(4)):
        assert found == [2, 3], "2 stays, though one is to be kept, until every part is known to have 3"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "tp-0", "tp-1"]
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["tp-0", "tp-1"]
    assert_resumed(gloo.run(jobs.resume_parts, tmp_path, None, ranks=range(4)), 3)

    newest = [tmp_path / part / "step-00000003" / "checkpoint.json" for part in ("tp-0", "tp-1")]
    mark, other = (json.loads(manifest.read_text())["written_by"]["mark"] for manifest in newest)
    assert mark == other
    newest[1].write_text(newest[1].read_text().replace(mark, f"{0:016x}"))  # saved again after a rollback, in this part
    results = gloo.run(jobs.resume_parts, tmp_path, None, ranks=range(4))
    assert_resumed(results, 2)
    assert "step-00000003 is not complete in every part of the model; step 2 is taken instead" in results[0][2][0]
    shutil.rmtree(newest[1].parent)
    for error in gloo.run(jobs.resume_parts, tmp_path, 3, ranks=range(4))[:2]:
        assert "CheckpointError: step 3 is not complete in every part of the model; those that are: [2]" in error
    (tmp_path / "tp-0" / "step-00000002" / "checkpoint.json").write_text("{")
    for error in gloo.run(jobs.resume_parts, tmp_path, None, ranks=range(4))[:2]:
        assert "no step is complete in every part of the model (tp-0 has 3; tp-1 has 2)" in error

    for before, after in (("tp-0", "tp-2"), ("tp-1", "tp-0"), ("tp-2", "tp-1")):
        (tmp_path / "one" / before).rename(tmp_path / "one" / after)
    for rank, error in enumerate(gloo.run(jobs.load_part, tmp_path / "one", ranks=range(4))[:2]):
        assert f"is the part tp {1 - rank} of 2 of a model, and this rank has tp {rank} of 2: restore it" in error


def test_parts_along_two_dimensions_find_what_all_have_and_an_error_of_one_reaches_all() -> None:
    """Ranks 0 to 5 are at (pp 0, tp 0), (pp 0, tp 1), (pp 1, tp 0) and so on."""

    def program(transport: Transport) -> tuple[list[int], str | None, str]:
        pp, tp = divmod(transport.rank, 2)
        groups: Any = (transport.split(range(tp, 6, 2)), transport.split((2 * pp, 2 * pp + 1), 1))
        optimizer = ZeroOptimizer(nn.Linear(2, 2), process_group=transport.split([transport.rank], 2))
        place = MeshPlace(("dp",), (1,), (("pp", pp, 3), ("tp", tp, 2)), groups)
        object.__setattr__(parts_of(optimizer), "mesh", place)
        parts = ModelParts(optimizer)
        assert parts.name == f"pp-{pp}-tp-{tp}"
        with parts.comparing():
            common = parts.common({1: "", 2: "a", 3 + transport.rank: "", 8: str(transport.rank), 9: "b"})
            broken = parts.broken("its file is short" if transport.rank == 3 else None)

        def fails() -> None:
            with parts.comparing():
                if transport.rank == 4:
                    raise ValueError("no room")
                parts.common({1: ""})

        return common, broken, error_of(fails)

    for rank, (common, broken, error) in enumerate(on_threads(6, program, timeout=BOUND)):
        assert common == [9, 2, 1]
        assert broken == ("its file is short" if rank == 3 else "pp-1-tp-1: its file is short")
        assert error == ("ValueError: no room" if rank == 4 else "RuntimeError: part pp-2-tp-0: no room")
