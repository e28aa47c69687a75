"""`clip_grad_norm_(over=...)`: the norm of a model whose parts are on several ranks, and what these must agree on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from collectives import Transport, on_threads
from zero import ZeroOptimizer

from ..support.errors import assert_in_order, error_of
from ..support.limits import BOUND, at_once
from ..support.narrowed import PRECISIONS
from ..support.plain import assert_same_value
from ..support.pool import GlooPool
from ..support.rows import rows
from ..support.sides import AsPlain
from . import jobs
from .jobs import assert_same_parts, clipped, compare_parts, groups_of, is_shared, loss_of, part_of


def joined(side: Any) -> list[Tensor]:
    """Train inside `join`, in which the ranks of each part have 2, 1 and 3 batches."""
    norms, counts = list[Tensor](), (2, 1, 3)
    copies = side.world_size if isinstance(side, AsPlain) else side.optimizer.world_size
    with side.join():
        for step in range(max(counts[rank] for rank in side.ranks)):
            mine = [rank for rank in side.ranks if step < counts[rank]]
            side.train(lambda model, rank, step=step: loss_of(model, step, rank), ranks=mine)
            norms.append(side.clip(0.5))
            side.step()
            side.clear()
    return norms[: min(counts[:copies])]


def overflow_once(parameter: Tensor) -> None:
    handle = parameter.register_hook(lambda gradient: (handle.remove(), gradient / 0)[1])


def scaled(side: Any) -> list[Any]:
    """Let a loss scaler skip the step of every part, since a gradient of one is not finite."""
    scaler, found = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2), list[Any]()
    for step in range(4):
        for name, parameter in side.model.named_parameters():
            if step == 1 and name.endswith("tower 0.2.bias") and 0 in side.ranks:
                overflow_once(parameter)
        side.train(lambda model, rank, step=step: scaler.scale(loss_of(model, step, rank)))
        if isinstance(side, AsPlain):
            side.settle()
        scaler.unscale_(side.optimizer)
        found.append(side.clip(0.5))
        side.step(scaler) if isinstance(side, AsPlain) else scaler.step(side.optimizer)
        scaler.update()
        side.clear()
        found.append(scaler.get_scale())
    return found


@pytest.mark.first(3)
@pytest.mark.parametrize(
    ("loop", "stage", "parts", "copies", "more"),
    [
        *((clipped, 3, 2, 3, {}), (clipped, 1, 3, 2, {"sharding_factor": 1}), (clipped, 2, 2, 2, {"stages": 2})),
        *((clipped, 2, 2, 2, {"precision": PRECISIONS["bf16"]}), (joined, 1, 2, 3, {}), (joined, 3, 2, 2, {})),
        *((scaled, 0, 2, 2, {}), (scaled, 2, 2, 2, {})),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else getattr(value, "__name__", None) or "-".join(value),
)
def test_the_norm_over_all_parts_is_that_of_the_whole_model(
    loop: Any, stage: int, parts: int, copies: int, more: dict[str, Any]
) -> None:
    """Each replicated parameter counts once, and all parts train to the bits of one process with the whole model. Ranks
    without batches follow a clip."""
    assert_same_parts(loop, parts, copies, stage=stage, **more)


@pytest.mark.parametrize(("stage", "as_group"), rows([(3, False)], [(1, True)]))
def test_parts_on_the_processes_of_a_mesh_have_the_whole_models_norm(
    gloo: GlooPool, stage: int, as_group: bool
) -> None:
    compare_parts(clipped, 2, 2, 1, gloo.run(jobs.train_parts, 2, 1, stage, as_group, ranks=range(4)))


def test_a_clip_in_a_part_of_a_job_warns_once_and_one_over_all_parts_never(gloo: GlooPool) -> None:
    found = gloo.run(jobs.warnings_of_clips, ranks=range(4))
    words = "the norm is that of this optimizer's parameters alone, and 2 further processes of the job are not in its"
    for rank, (alone, over, whole) in enumerate(found):
        assert alone.count(words) == (rank < 2), "on rank 0 of each optimizer"
        assert not over
        assert not whole


# -- what ranks must agree on ------------------------------------------------------------------------------------------


def other_batch(at: Any) -> dict[str, Any]:
    at.model.shared(torch.ones(1, 3) * (at.rank % 2)).sum().backward()
    return {}


def unused(at: Any) -> dict[str, Any]:
    at.model.zero_grad()
    loss_of(at.model, 0, 0).backward() if at.rank % 2 else at.model.towers["tower 0"](torch.ones(1, 3)).sum().backward()
    return {}


def closed(at: Any) -> dict[str, Any]:
    if at.rank % 2:
        at.optimizer.close()
    return {}


def inside_no_sync(at: Any) -> dict[str, Any]:
    if at.rank % 2:
        at.stack.enter_context(at.optimizer.no_sync())
    return {}


DIFFERENT = "the gradient of the replicated parameter 'shared.weight' differs between ranks 0 and 1 of the group"
NO_GROUP, NONE = "ValueError: over=[] has no group", "a group of ranks must be a ProcessGroup of torch.distributed"
AT_A_PLACE = "clip_grad_norm_(over=...): max_norm is 1.0 on rank 0, and 2.0 on rank 1"
Change = Callable[[Any], dict[str, Any]]
FAULTS: dict[str, tuple[int, Change, str]] = {  # stages, other arguments of a clip, words of the error on every rank
    "other norm": (
        1,
        lambda at: {"max_norm": 1.0 + at.rank % 2},
        "ValueError: clip_grad_norm_(over=...): max_norm is 1.0 on rank 0 of the group, and 2.0 on rank 1",
    ),
    "other norm at a place": (1, lambda at: {"max_norm": 1.0 + at.rank // 2}, AT_A_PLACE),
    "more names": (
        1,
        lambda at: {"replicated": lambda name, p: is_shared(name, p) or (at.rank % 2 and "0.bias" in name)},
        "ValueError … replicated= has 'towers.tower 1.0.bias' on rank 1 of the group, but not on rank 0",
    ),
    "own group": (
        1,
        lambda at: {"over": at.data},
        "ValueError … rank 0 of the group is rank 0 of 2 in its optimizer, and rank 1 is rank 1 of 2",
    ),
    "foreign": (
        1,
        lambda at: {"replicated": [torch.ones(2, 3)]} if at.rank == 3 else {},
        "replicated=: ValueError: a tensor of shape (2, 3) is not one of this optimizer's parameters",
    ),
    "a module": (
        1,
        lambda at: {"replicated": at.model.shared},
        "replicated=: TypeError: a module is neither parameters nor a predicate: give module.parameters()",
    ),
    "one fewer": (
        1,
        lambda at: {"replicated": [at.model.shared.weight]} if at.rank > 1 else {},
        "replicated= has ['shared.weight', 'shared.bias'] on rank 0, and ['shared.weight'] on rank 1",
    ),
    "other batch": (1, other_batch, f"{DIFFERENT} … or leave it out of replicated="),
    "other batch in one stage": (2, lambda at: other_batch(at) if at.rank < 2 else {}, DIFFERENT),
    "unused": (1, unused, "'shared.weight' has a gradient on rank 1 of the group, and none on rank 0"),
    "in another order": (2, lambda at: {"over": at.over[::-1]}, "differs between ranks 0 and 1 of the group"),
    "twice": (2, lambda at: {"over": [at.over[0]] * 2}, "a rank is in two of the groups"),
    "not by all": (2, lambda at: {"over": at.over[: 1 + at.over[0].rank]}, "number of groups in over="),
    "no group": (1, lambda at: {"over": []}, NO_GROUP),
    "no group on one rank": (2, lambda at: {"over": []} if at.rank == 3 else {}, "over=[] has no group"),
    "no group of ranks on one rank": (2, lambda at: {"over": "tp"} if at.rank == 3 else {}, NONE),
    "closed": (1, closed, "this optimizer is closed"),
    "inside no_sync": (1, inside_no_sync, "inside no_sync()"),
    "max_norm": (
        1,
        lambda at: {"max_norm": -1.0} if at.rank == 3 else {},
        "ValueError: max_norm must be at least 0 (math.inf to measure without clipping), not -1.0",
    ),
    "also": (1, lambda at: {"also": []} if at.rank == 1 else {}, "clip_grad_norm_(over=...) with also=: "),
    "left out": (
        1,
        lambda at: {"over": None, "replicated": ()} if at.rank == 0 else {},
        "is in clip_grad_norm_(over=...) [",
    ),
}
LATER = ("no group on one rank", "no group of ranks on one rank", "left out")
LAST = ("closed", "left out")  # no clip can follow


@pytest.mark.first(5)
@pytest.mark.parametrize(
    ("name", "stage"), rows([(name, 2) for name in FAULTS], [(name, stage) for name in FAULTS for stage in (0, 3)])
)
def test_what_ranks_do_not_agree_on_is_an_error_on_all_of_them_and_training_goes_on(name: str, stage: int) -> None:
    """In every part at once, also if one rank of a part refuses before the clip begins. Ranks that wait for one that
    gives no group know of it by an earlier clip."""
    stages, change, words = FAULTS[name]
    earlier = name in LATER

    def program(transport: Transport) -> list[Any]:
        data, over = groups_of(transport, 2, stages)
        model = part_of(transport.rank, 2, stages)
        optimizer = ZeroOptimizer(model, stage=stage, process_group=data, lr=0.1)
        arguments = {"max_norm": 1.0, "over": over if stages > 1 else over[0], "replicated": is_shared}
        found = list[Any]()
        for wrong in (*[False] * earlier, True, *[False] * (name not in LAST)):
            with ExitStack() as stack:
                loss_of(model, 0, transport.rank // (2 * stages)).backward()
                at = {"rank": transport.rank, "model": model, "data": data, "over": over, "optimizer": optimizer}
                own = {**arguments, **(change(SimpleNamespace(**at, stack=stack)) if wrong else {})}
                if wrong:
                    found.append(error_of(optimizer.clip_grad_norm_, **own))
                else:
                    found.append(optimizer.clip_grad_norm_(**own))
                    optimizer.step()
            if name not in LAST or not wrong:
                optimizer.zero_grad()
        return found

    with at_once():
        results = on_threads(8 if stages > 1 and earlier else 4, program, timeout=4 * BOUND)
    for found in results:
        error = found[earlier]
        assert_in_order(words, error)
        assert "\n" not in error
        norms = [[each for each in of_rank if isinstance(each, Tensor)] for of_rank in (found, results[0])]
        assert_same_value(*norms, "norms")
