"""Classes with `train()` and `eval()`, such as schedule-free ones: the weights of each mode are the plain loop's."""

from __future__ import annotations

import copy
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from collectives import Transport, on_threads, solo
from zero import Offload, ShardedAverage, ZeroOptimizer

from ..contract.space import HABITS
from ..support.errors import error_of, errors_on, is_plain, warned
from ..support.loops import Several, seeded
from ..support.models import odd_batches, odd_loss
from ..support.narrowed import PRECISIONS
from ..support.plain import assert_same_model, assert_same_states
from ..support.programs import Program, check, locked_build
from ..support.rows import rows
from ..support.sides import AsPlain, OnRank, Side, same_as_plain
from ..support.small import TwoVectors
from ..support.two_modes import Averaged, Centred, ScheduleFree
from .training import TOGETHER, average_of, train, values

BF16 = PRECISIONS["bf16"]
OFFLOAD = Offload(tempfile.gettempdir())


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "program",
    rows(
        [
            Program(3, 3, "schedule-free", precision=BF16, steps=HABITS["freezes"]),
            Program(3, 2, "averaged", precision=BF16, steps=HABITS["clips"]),
            Program(3, 1, "centred", partition="parameter", steps=HABITS["no sync"]),
        ],
        [
            Program(4, 3, "averaged", sharding_factor=2, reshard=False, collective="pairwise", steps=HABITS["freezes"]),
            Program(2, 0, "schedule-free", offload=OFFLOAD, steps=HABITS["fewer"]),
            Program(1, 3, "averaged", precision=PRECISIONS["fp16"], scaled=True, steps=HABITS["scales"]),
        ],
    ),
    ids=lambda program: f"{program.world_size}-{program.stage}-{program.optimizer}",
)
def test_weights_and_states_of_each_mode_are_those_of_the_plain_loop(program: Program) -> None:
    """Also in an evaluation between a backward and its step."""
    check(program)


@pytest.mark.usefixtures("accelerated")
def test_weights_that_are_rounded_where_they_are_read_are_those_of_the_mode() -> None:
    check(Program(2, 3, "schedule-free", collective="pairwise", precision=BF16, steps=HABITS["clips"]))


@pytest.mark.first(1)
@pytest.mark.filterwarnings("ignore:not restored from")
@pytest.mark.parametrize(("mode", "cls"), [("train", ScheduleFree), ("eval", ScheduleFree), ("eval", Averaged)])
def test_a_training_goes_on_from_a_checkpoint_of_either_mode_at_another_topology(
    mode: str, cls: Any, tmp_path: Path
) -> None:
    """The weights change to the other mode while the checkpoint is written. A class may have a state in one mode
    alone."""
    plain = AsPlain(locked_build(0), cls, 1, BF16, TOGETHER)

    def begin(side: Side) -> None:
        side.set_mode("train")
        train(side, range(2))
        side.set_mode(mode)

    def go_on(side: Side) -> Any:
        side.model.train(mode == "train")
        seen = odd_loss(side.model, odd_batches(1, 9)[0]).detach()
        side.set_mode("train")
        train(side, range(2, 3))
        side.set_mode("eval")
        return seen

    def side_of(transport: Transport, stage: int) -> OnRank:
        model = locked_build(transport.rank)
        arguments: dict[str, Any] = {"divisor": TOGETHER, "mixed_precision": BF16, "bucket_cap_mb": 0.0005}
        return OnRank(model, ZeroOptimizer(model, cls, stage=stage, process_group=transport, **arguments))

    def first(transport: Transport) -> None:
        side = side_of(transport, 3)
        begin(side)
        with zero.CheckpointManager(tmp_path / "saved", side.optimizer) as checkpoints:
            pending = checkpoints.save(2)
            side.set_mode("eval" if mode == "train" else "train")
            pending.result(30)

    def then(transport: Transport) -> Any:
        side = side_of(transport, 1)
        with zero.CheckpointManager(tmp_path / "saved", side.optimizer) as checkpoints:
            checkpoints.restore()
        assert {group.get("train_mode", mode == "train") for group in side.optimizer.param_groups} == {mode == "train"}
        seen = go_on(side)
        side.optimizer.consolidate_state_dict(None)
        states = side.optimizer.state_dict()
        side.optimizer.close()
        return side.model, states, seen

    on_threads(2, first)
    begin(plain)
    expected, states = go_on(plain), plain.optimizer.state_dict()
    for model, found, seen in on_threads(3, then):
        assert torch.equal(seen, expected)
        assert_same_model(model, plain.model)
        assert_same_states(found, states)
        options = {key: found["param_groups"][0][key] for key in states["param_groups"][0]}
        assert options == states["param_groups"][0]


def test_averages_of_evaluated_weights_are_those_of_the_plain_loop() -> None:
    def loop(side: Side) -> Any:
        average = average_of(side, "ema")
        for step in range(2):
            side.set_mode("train")
            train(side, range(step, step + 1))
            side.set_mode("eval")
            average.update_parameters(*([side.model] if isinstance(side, AsPlain) else []))
        side.set_mode("train")
        side.model.eval()  # the weights are those of the average, and those of no mode
        block, model = nullcontext(), side.model
        if isinstance(average, ShardedAverage):
            block = average.applied()
        else:
            model = average.module
        with block, torch.no_grad():
            seen = model(odd_batches(1, 9)[0][0])
            if isinstance(side, OnRank):
                assert "inside applied() of the average" in error_of(side.set_mode, "eval")
                side.model.eval()
        return values(average), seen

    with warned() as warnings:
        same_as_plain(loop, lambda: locked_build(0), ScheduleFree, 3, settings={"stage": 3}, divisor=TOGETHER)
    assert warnings == []


def test_of_several_classes_those_with_modes_exchange_their_weights() -> None:
    """That of a group that is added later, too."""
    models = [seeded(0, lambda: nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))) for _ in range(3)]
    plain: Any = models.pop()
    adamw, free = torch.optim.AdamW(plain[0].parameters(), lr=0.1), ScheduleFree(plain[1].parameters())
    batches = torch.randn(3, 2, 4, 6, generator=torch.Generator().manual_seed(0))

    def loop(side: Any, modes: Any, added: Any) -> list[Tensor]:
        seen = []
        for step in range(3):
            if step == 1:
                modes.add_param_group({"params": [*side.model[2].parameters()], **added})
            side.model.train()
            modes.train()
            side.train(lambda model, rank, step=step: model(batches[step, rank]).square().mean())
            side.step()
            side.clear("module")
            side.model.eval()
            modes.eval()
            seen.append(side.model(batches[0, 0]).detach())
        return seen

    expected = loop(AsPlain(plain, lambda _: Several(adamw, free), 2), free, {})

    def program(transport: Transport) -> Any:
        model: Any = models[transport.rank]
        own = {"optimizer_class": ScheduleFree}
        groups = [{"params": [*model[0].parameters()]}, {"params": [*model[1].parameters()], **own}]
        optimizer = ZeroOptimizer(groups, module=model, process_group=transport, lr=0.1)
        seen = loop(OnRank(model, optimizer), optimizer, own)
        optimizer.close()
        return model, seen

    for model, seen in on_threads(2, program):
        assert_same_model(model, plain)
        assert all(map(torch.equal, seen, expected))


# -- what is refused ---------------------------------------------------------------------------------------------------


def built(transport: Transport, cls: Any = ScheduleFree, stage: int = 2, **arguments: Any) -> tuple[Any, ZeroOptimizer]:
    model = locked_build(0)
    return model, ZeroOptimizer(model, cls, stage=stage, process_group=transport, bucket_cap_mb=0.0005, **arguments)


def backward(model: Any, transport: Transport) -> None:
    odd_loss(model, odd_batches(transport.world_size)[transport.rank]).backward()


@pytest.mark.parametrize("stage", rows([3], [0, 2]))
def test_a_step_in_eval_mode_is_refused_on_every_rank_and_can_be_taken_after_train(stage: int) -> None:
    def program(transport: Transport) -> Any:
        model, optimizer = built(transport, stage=stage)
        backward(model, transport)
        said = error_of(optimizer.step)
        optimizer.train()
        optimizer.step()
        optimizer.close()
        return said, model

    plain = AsPlain(locked_build(0), ScheduleFree, 2)
    plain.set_mode("train")
    plain.train(lambda model, rank: odd_loss(model, odd_batches(2)[rank]))
    plain.step()
    with warned() as warnings:
        results = on_threads(2, program)
    for said, model in results:
        assert "step() in eval mode: param group 0, of ScheduleFree" in said
        assert "Call optimizer.train() on all ranks" in said
        assert_same_model(model, plain.model)
    assert len(warnings) == 2  # of each rank one
    assert (
        "a forward in train mode with the weights of the optimizer's eval mode: call optimizer.train()" in warnings[0]
    )


def test_calls_at_a_wrong_moment_are_refused_on_every_rank() -> None:
    def program(transport: Transport) -> list[str]:
        model, optimizer = built(transport, stage=3)
        with optimizer.gathered():
            said = [error_of(optimizer.train)]
        with optimizer.join():
            said.append(error_of(optimizer.train))
        optimizer.train()
        model.scale.register_hook(lambda _: said.append(error_of(optimizer.eval)))
        backward(model, transport)
        return said

    for inside_gathered, *others in on_threads(2, program):
        assert "train() inside gathered() or inside a forward: leave it first" in inside_gathered
        assert "train() inside a backward or inside join(): leave it first" in others[0]
        assert "eval() inside a backward or inside join(): leave it first" in others[1]


@pytest.mark.parametrize("what", ["memory", "list"])
def test_parameters_that_were_replaced_are_named_on_every_rank(what: str) -> None:
    def program(transport: Transport) -> None:
        model, optimizer = built(transport)
        if transport.rank == 1 and what == "memory":
            model.first.weight.data = model.first.weight.data.clone()
        elif transport.rank == 1:
            optimizer.param_groups.append({**optimizer.param_groups[0], "params": [model.first.weight]})
        optimizer.train()

    for said in errors_on(2, program):
        assert "rank 1" in said
        assert "'first.weight'" in said


def test_a_dict_of_the_mode_before_is_not_returned() -> None:
    def program(transport: Transport) -> str:
        _, optimizer = built(transport)
        optimizer.consolidate_state_dict(None)
        optimizer.train()
        return error_of(optimizer.state_dict)

    for said in on_threads(2, program):
        assert "consolidate_state_dict" in said


def test_ranks_that_change_to_different_modes_learn_of_it() -> None:
    def program(transport: Transport) -> None:
        _, optimizer = built(transport)
        optimizer.train()
        optimizer.eval() if transport.rank else optimizer.step()

    for said in errors_on(2, program):
        assert "eval()" in said
        assert "step()" in said


class Fails(ScheduleFree):
    def eval(self) -> None:
        if self.param_groups[0].get("fails"):
            raise ZeroDivisionError("of one rank")
        super().eval()


def test_an_error_of_the_class_on_one_rank_reaches_the_others() -> None:
    def program(transport: Transport) -> None:
        _, optimizer = built(transport, Fails)
        optimizer.train()
        optimizer.param_groups[0]["fails"] = transport.rank == 1
        optimizer.eval()

    for said in errors_on(3, program):
        assert "ZeroDivisionError: of one rank" in said


def test_without_such_a_class_there_is_no_call_and_no_hook() -> None:
    model, optimizer = built(solo(), torch.optim.AdamW)
    assert not hasattr(optimizer, "train")
    assert not hasattr(optimizer, "eval")
    with pytest.raises(AttributeError, match=r"AdamW has no train\(\) and eval\(\).*leave out optimizer.eval\(\)"):
        optimizer.eval()
    assert not model._forward_pre_hooks


def test_the_mode_is_no_argument_as_it_is_of_a_module() -> None:
    _, optimizer = built(solo(), stage=1)
    call: Any = optimizer.train
    with pytest.raises(TypeError, match=r"ZeroOptimizer\.train\(\) takes 0 positional arguments but 1 was given"):
        call(False)


def test_a_forward_in_the_wrong_mode_warns_once() -> None:
    model, optimizer = built(solo())
    tokens = odd_batches(1)[0][0]

    def forwards() -> None:
        copy.deepcopy(model)(tokens)
        optimizer.train()
        model(tokens)
        optimizer.eval()
        model.eval()(tokens)
        optimizer.train()
        model(tokens)
        optimizer.eval()
        model.train()(tokens)

    with pytest.warns() as warnings:
        forwards()
    assert len(warnings) == 1
    said = warnings[0]
    assert (said.category, said.filename) == (RuntimeWarning, __file__)
    assert "a forward in eval mode with the weights of the optimizer's train mode" in str(said.message)
    optimizer.close()
    assert "this optimizer is closed: the model is plain again" in error_of(optimizer.eval)
    assert is_plain(model)
    with warned() as later:
        model.eval()(tokens)
    assert later == []


@pytest.mark.filterwarnings("ignore:.*a newer ZeroOptimizer took over")
def test_forwards_are_checked_for_the_newest_optimizer_and_for_classes_whose_groups_have_a_mode() -> None:
    model: Any = seeded(0, lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    x = torch.ones(1, 3)
    with warned() as warnings:
        older = ZeroOptimizer(model, ScheduleFree, process_group=solo())
        newer = ZeroOptimizer(model, Averaged, process_group=solo())
        model(x)
    assert warnings == []
    newer.close()
    older.close()
    optimizer = ZeroOptimizer(list(model[0].parameters()), module=model, process_group=solo())
    optimizer.add_param_group({"params": list(model[1].parameters()), "optimizer_class": ScheduleFree})
    with warned() as warnings:
        model(x)
    assert len(warnings) == 1


def test_a_call_in_the_same_mode_sends_nothing_and_no_call_makes_masters_of_frozen_parameters() -> None:
    def program(transport: Transport) -> None:
        _, optimizer = built(transport, mixed_precision=BF16)
        before = str(optimizer.describe())
        optimizer.train()
        sent = optimizer.traffic.control_sent
        assert sent > 0
        optimizer.train()
        assert optimizer.traffic.control_sent == sent
        assert str(optimizer.describe()) == before

    on_threads(2, program)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_graph_that_is_kept_across_an_exchange_raises_as_across_a_step(world_size: int) -> None:
    def program(transport: Transport) -> str:
        model, optimizer = built(transport, stage=3)
        optimizer.train()
        backward(model, transport)
        optimizer.step()
        optimizer.zero_grad()
        loss = odd_loss(model, odd_batches(1)[0])
        optimizer.eval()
        return error_of(loss.backward)

    for said in on_threads(world_size, program):
        assert ("modified by an inplace operation" if world_size == 1 else "changed") in said


def test_a_class_whose_modes_look_at_whole_parameters_is_refused_by_elements() -> None:
    with pytest.raises(ValueError, match=r"Centred is not element-wise: .*\(after eval\(\)\)"):
        ZeroOptimizer(TwoVectors(), Centred, process_group=solo(), partition="element")
