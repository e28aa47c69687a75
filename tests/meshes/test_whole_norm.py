"""`clip_grad_norm_(over=...)`: the norm of a model whose parts are on several ranks, and what these must agree on."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads
from zero import ZeroOptimizer

from ..support.errors import error_of
from ..support.limits import BOUND, at_once
from ..support.narrowed import PRECISIONS
from ..support.pool import GlooPool
from ..support.rows import rows
from ..support.sides import AsPlain, Loop
from . import jobs
from .spread import (
    OnPart,
    Part,
    Stages,
    assert_same_parts,
    clipped,
    compare_parts,
    groups_of,
    groups_of_stages,
    is_shared,
    loss_of,
    stage_part,
)


@pytest.mark.parametrize(
    ("stage", "parts", "copies", "more"),
    rows(
        [(3, 2, 3, {}), (1, 3, 2, {"sharding_factor": 1}), (2, 2, 2, {"precision": PRECISIONS["bf16"]})],
        [(0, 2, 2, {}), (3, 3, 2, {"sharding_factor": 1}), (2, 3, 1, {}), (1, 2, 3, {"bucket_cap_mb": 0.0001})],
    ),
    ids=lambda value: str(value) if isinstance(value, int) else "-".join(value),
)
def test_the_norm_over_all_parts_is_that_of_the_whole_model(
    stage: int, parts: int, copies: int, more: dict[str, Any]
) -> None:
    """Each replicated parameter counts once, and all parts train to the bits of one process with the whole model."""
    assert_same_parts(clipped(), parts, copies, stage=stage, **more)


def joined(counts: tuple[int, ...]) -> Loop:
    """Return a loop inside `join`, in which the ranks of each part have these numbers of batches."""

    def loop(side: Any) -> list[Tensor]:
        norms = list[Tensor]()
        with side.join():
            for step in range(max(counts[rank] for rank in side.ranks)):
                mine = [rank for rank in side.ranks if step < counts[rank]]
                side.train(lambda model, rank, step=step: loss_of(model, step, rank), ranks=mine)
                norms.append(side.clip(0.5))
                side.step()
                side.clear()
        return norms[: min(counts)]

    return loop


@pytest.mark.parametrize(("stage", "counts"), rows([(1, (2, 0, 3))], [(0, (1, 3)), (3, (3, 1))]))
def test_ranks_without_batches_follow_a_clip_over_all_parts(stage: int, counts: tuple[int, ...]) -> None:
    assert_same_parts(joined(counts), 2, len(counts), stage=stage)


def overflow_once(parameter: Tensor) -> None:
    handle = parameter.register_hook(lambda gradient: (handle.remove(), gradient / 0)[1])


@pytest.mark.parametrize("stage", rows([0, 2], [1, 3]))
def test_a_loss_scaler_skips_the_step_of_every_part_if_a_gradient_of_one_is_not_finite(stage: int) -> None:
    def loop(side: Any) -> list[Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        found = list[Any]()
        for step in range(4):
            if step == 1 and "tower 0" in side.model.towers and 0 in side.ranks:
                overflow_once(side.model.towers["tower 0"][2].bias)
            side.train(lambda model, rank, step=step: scaler.scale(loss_of(model, step, rank)))
            is_plain = isinstance(side, AsPlain)
            if is_plain:
                side.settle()
            scaler.unscale_(side.optimizer)
            found.append(side.clip(0.5))
            if is_plain:
                side.step(scaler)
            else:
                scaler.step(side.optimizer)
            scaler.update()
            side.clear()
            found.append(scaler.get_scale())
        return found

    assert_same_parts(loop, 2, 2, stage=stage)


def other_norm(rank: int, **_: Any) -> dict[str, Any]:
    return {"max_norm": 1.0 + rank % 2}


def other_norm_at_a_place(rank: int, **_: Any) -> dict[str, Any]:
    return {"max_norm": 1.0 + rank // 2}


def more_names(rank: int, **_: Any) -> dict[str, Any]:
    return {"replicated": lambda name, parameter: is_shared(name, parameter) or (rank % 2 and "0.bias" in name)}


def own_group(data: Transport, **_: Any) -> dict[str, Any]:
    return {"over": data}


def foreign(rank: int, **_: Any) -> dict[str, Any]:
    return {"replicated": [torch.ones(2, 3)]} if rank == 3 else {}


def a_module(model: Part, **_: Any) -> dict[str, Any]:
    return {"replicated": model.shared}


def one_fewer(rank: int, model: Part, **_: Any) -> dict[str, Any]:
    return {"replicated": [model.shared.weight]} if rank > 1 else {}


def other_batch(rank: int, model: Part, **_: Any) -> dict[str, Any]:
    model.shared(torch.ones(1, 3) * (rank % 2)).sum().backward()
    return {}


def unused(rank: int, model: Part, **_: Any) -> dict[str, Any]:
    model.zero_grad()
    if rank % 2:
        loss_of(model, 0, rank // 2).backward()
    else:
        model.towers["tower 0"](torch.ones(1, 3)).sum().backward()
    return {}


DIFFERENT = "the gradient of the replicated parameter 'shared.weight' differs between ranks 0 and 1 of the group"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            other_norm,
            ["ValueError: clip_grad_norm_(over=...): max_norm is 1.0 on rank 0 of the group, and 2.0 on rank 1"],
        ),
        (other_norm_at_a_place, ["clip_grad_norm_(over=...): max_norm is 1.0 on rank 0, and 2.0 on rank 1"]),
        (
            more_names,
            ["ValueError", "replicated= has 'towers.tower 1.0.bias' on rank 1 of the group, but not on rank 0"],
        ),
        (own_group, ["ValueError", "rank 0 of the group is rank 0 of 2 in its optimizer, and rank 1 is rank 1 of 2"]),
        (foreign, ["replicated=: ValueError: a tensor of shape (2, 3) is not one of this optimizer's parameters"]),
        (
            a_module,
            ["replicated=: TypeError: a module is neither parameters nor a predicate: give module.parameters()"],
        ),
        (one_fewer, ["replicated= has ['shared.weight', 'shared.bias'] on rank 0, and ['shared.weight'] on rank 1"]),
        (other_batch, [DIFFERENT, "or leave it out of replicated="]),
        (unused, ["'shared.weight' has a gradient on rank 1 of the group, and none on rank 0"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
@pytest.mark.parametrize("stage", rows([2], [0, 3]))
def test_what_ranks_do_not_agree_on_is_an_error_on_all_of_them_and_training_goes_on(
    stage: int, change: Any, words: list[str]
) -> None:
    def program(transport: Transport) -> tuple[str, Tensor]:
        data, over = groups_of(transport, 2)
        model = Part(transport.rank % 2)
        optimizer = ZeroOptimizer(model, stage=stage, process_group=data, lr=0.1)
        loss_of(model, 0, transport.rank // 2).backward()
        arguments = {"max_norm": 1.0, "over": over, "replicated": is_shared}
        wrong = change(rank=transport.rank, model=model, data=data)
        error = error_of(optimizer.clip_grad_norm_, **{**arguments, **wrong})
        optimizer.zero_grad()
        loss_of(model, 0, transport.rank // 2).backward()
        norm = optimizer.clip_grad_norm_(**arguments)
        optimizer.step()
        optimizer.close()
        return error, norm

    found = on_threads(4, program, timeout=BOUND)
    for error, norm in found:
        assert all(word in error for word in words), error
        assert "\n" not in error
        assert torch.equal(norm, found[0][1])


def of_stage(transport: Transport, stage: int, parts: int) -> tuple[Part, ZeroOptimizer, Transport, Transport]:
    """Return a rank's part of two stages, its optimizer, and the groups along tensors and along the pipeline."""
    data, tensor, pipeline = groups_of_stages(transport, 2, parts)
    number = transport.rank % (2 * parts)
    model = stage_part(number // parts, number)
    return model, ZeroOptimizer(model, torch.optim.AdamW, lr=0.1, process_group=data, stage=stage), tensor, pipeline


@pytest.mark.parametrize(
    ("stage", "parts", "copies", "loop"),
    rows([(2, 2, 2, clipped())], [(3, 3, 1, clipped()), (0, 2, 1, clipped()), (1, 2, 2, joined((1, 2)))]),
    ids=lambda value: str(value) if isinstance(value, int) else value.__qualname__.partition(".")[0],
)
def test_a_norm_that_each_part_of_a_stage_has_counts_once_where_a_model_is_cut_in_two_ways(
    stage: int, parts: int, copies: int, loop: Loop
) -> None:
    """The stages have parameters of the same names, which are others."""
    whole = Stages(2, parts)
    expected = loop(AsPlain(whole, lambda updated: torch.optim.AdamW(updated, lr=0.1), copies))

    def program(transport: Transport) -> tuple[nn.Module, Any]:
        model, optimizer, tensor, pipeline = of_stage(transport, stage, parts)
        found = loop(OnPart(model, optimizer, [tensor, pipeline], is_shared))
        optimizer.close()
        return model, found

    results = on_threads(2 * parts * copies, program, timeout=BOUND)
    for number, part in enumerate(whole.stages):
        of_part = [each for rank, each in enumerate(results) if rank % (2 * parts) // parts == number]
        compare_parts(part, expected, of_part)


@pytest.mark.parametrize(
    ("over", "words"),
    [
        (lambda tensor, pipeline: [pipeline, tensor], "differs between ranks 0 and 1 of the group"),
        (lambda tensor, pipeline: [tensor, tensor], "a rank is in two of the groups"),
        (lambda tensor, pipeline: [tensor, pipeline][: 1 + tensor.rank], "number of groups in over="),
    ],
    ids=["in another order", "twice", "not by all"],
)
def test_groups_that_do_not_cut_the_model_in_two_ways_are_an_error_on_all_ranks(over: Any, words: str) -> None:
    def program(transport: Transport) -> str:
        model, optimizer, tensor, pipeline = of_stage(transport, 2, 2)
        loss_of(model, 0, 0).backward()
        return error_of(optimizer.clip_grad_norm_, 1.0, over=over(tensor, pipeline), replicated=is_shared)

    for error in on_threads(4, program, timeout=BOUND):
        assert words in error


def test_an_error_along_one_group_reaches_the_ranks_of_the_other_one() -> None:
    def program(transport: Transport) -> str:
        model, optimizer, tensor, pipeline = of_stage(transport, 2, 2)
        loss_of(model, 0, 0 if transport.rank else 1).backward()
        return error_of(optimizer.clip_grad_norm_, 1.0, over=[tensor, pipeline], replicated=is_shared)

    errors = on_threads(4, program, timeout=BOUND)
    assert all(DIFFERENT in error for error in errors)
    assert [error.startswith("ValueError") for error in errors] == [True, True, False, False]


@pytest.mark.parametrize("refused", ["closed", "no_sync", "max_norm", "also", "no group"])
def test_a_clip_that_one_part_refuses_before_it_begins_is_an_error_in_the_others_at_once(refused: str) -> None:
    """Part 1 refuses; so does one rank of it alone, where arguments differ."""

    def program(transport: Transport) -> str:
        data, over = groups_of(transport, 2)
        model = Part(transport.rank % 2)
        optimizer = ZeroOptimizer(model, process_group=data)
        loss_of(model, 0, 0).backward()
        arguments: dict[str, Any] = {"max_norm": 1.0, "over": over, "replicated": is_shared}
        with optimizer.no_sync() if refused == "no_sync" and transport.rank % 2 else nullcontext():
            if refused == "closed" and transport.rank % 2:
                optimizer.close()
            if refused == "max_norm" and transport.rank == 3:
                arguments["max_norm"] = -1.0
            if refused == "also" and transport.rank == 1:
                arguments["also"] = []
            if refused == "no group":
                arguments["over"] = []
            return error_of(optimizer.clip_grad_norm_, **arguments)

    words = {
        "closed": "this optimizer is closed",
        "no_sync": "inside no_sync()",
        "max_norm": "ValueError: max_norm must be at least 0 (math.inf to measure without clipping), not -1.0",
        "also": "clip_grad_norm_(over=...) with also=: ",
        "no group": "ValueError: over=[] has no group",
    }
    for error in on_threads(4, program, timeout=BOUND):
        assert words[refused] in error


@pytest.mark.parametrize("over", [[], "tp"], ids=str)
def test_a_rank_that_gives_no_group_at_all_is_an_error_in_every_part_at_once(over: Any) -> None:
    """The ranks of the other parts, which wait for it, are those of earlier clips."""

    def program(transport: Transport) -> list[str]:
        model, optimizer, *groups = of_stage(transport, 2, 2)
        errors = []
        for clip in range(3):
            loss_of(model, 0, 0).backward()
            given = over if clip == 1 and transport.rank == 3 else groups
            errors.append(error_of(optimizer.clip_grad_norm_, 1.0, over=given, replicated=is_shared))
            optimizer.zero_grad()
        return errors

    words = "over=[] has no group" if over == [] else "a group of ranks must be a ProcessGroup of torch.distributed"
    for before, error, after in on_threads(8, program, timeout=BOUND):
        assert words in error
        assert before == after == "nothing"


@pytest.mark.parametrize(("stage", "how"), rows([(3, "a mesh")], [(1, "a group")]))
def test_parts_on_the_processes_of_a_mesh_have_the_whole_models_norm(gloo: GlooPool, stage: int, how: str) -> None:
    whole = Part(0, 1)
    expected = clipped()(AsPlain(whole, lambda updated: torch.optim.AdamW(updated, lr=0.1), 2))
    compare_parts(whole, expected, gloo.run(jobs.train_parts, 2, stage, how, ranks=range(4)))


def test_a_clip_in_a_part_of_a_job_warns_once_and_one_over_all_parts_never(gloo: GlooPool) -> None:
    found = gloo.run(jobs.warnings_of_clips, ranks=range(4))
    words = "the norm is that of this optimizer's parameters alone, and 2 further processes of the job are not in its"
    for rank, (alone, over, whole) in enumerate(found):
        assert alone.count(words) == (rank < 2), "on rank 0 of each optimizer"
        assert not over
        assert not whole


def test_a_rank_that_leaves_out_the_group_of_its_second_clip_is_an_error_in_every_part_at_once() -> None:
    """The other ranks of its optimizer show it. Alone in one, it may as well clip its own part."""

    def program(transport: Transport) -> list[str]:
        data, over = groups_of(transport, 2)
        model = nn.Linear(3, 3)
        optimizer = ZeroOptimizer(model, torch.optim.SGD, process_group=data, lr=0.1)
        errors = []
        for clip in range(2):
            model(torch.ones(1, 3)).sum().backward()
            given = {} if clip and transport.rank == 0 else {"over": over}
            errors.append(error_of(optimizer.clip_grad_norm_, 1.0, **given))
            if not errors[-1].startswith("nothing"):
                break
            optimizer.zero_grad()
        return errors

    with at_once():
        found = on_threads(4, program, timeout=4 * BOUND)
    for before, error in found:
        assert before == "nothing"
        assert "is in clip_grad_norm_() [" in error
        assert "is in clip_grad_norm_(over=...) [" in error
