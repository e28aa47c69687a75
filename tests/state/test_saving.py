"""States: whose they are, and that training goes on from a saved dict, at any stage and on any number of ranks."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives import Transport, on_threads
from zero import MixedPrecision, ZeroOptimizer

from ..faces import ALL_STAGES, SGD, Two, trained
from ..models import odd_batches, odd_loss
from ..plain import assert_same_bits, assert_same_states, plain_step, share
from ..pool import GlooPool
from ..programs import locked_build


def test_loading_shares_nothing_with_the_dict_and_saving_nothing_with_the_optimizer() -> None:
    model = Two()
    optimizer = ZeroOptimizer(model, SGD, lr=torch.tensor(0.3), momentum=0.9)
    model(1.0).backward()
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"].clear()
    assert optimizer.state_dict()["state"]
    plain = SGD(Two().parameters(), lr=torch.tensor(0.25), momentum=0.9)
    theirs = plain.state_dict()
    theirs["state"] = {0: {"momentum_buffer": None}}
    optimizer.load_state_dict(theirs)
    optimizer.param_groups[0]["lr"].fill_(9)
    assert theirs["param_groups"][0]["lr"] == 0.25
    optimizer.zero_grad()
    model(1.0).backward()
    expected = 2 * model.a.detach()  # a first buffer is the gradient itself
    optimizer.step()
    assert_same_bits(optimizer.state_dict()["state"][0]["momentum_buffer"], expected)
    assert bool(expected.any())


def consolidated(transport: Any, rank: int, stage: int, factor: int | None, narrow: bool) -> list[dict[str, Any]]:
    """This rank's dict after `consolidate_state_dict(to=None)`, and after ``to=`` this rank."""
    precision = MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16) if narrow else None
    model = locked_build(0)
    optimizer = ZeroOptimizer(
        model,
        stage=stage,
        process_group=transport,
        bucket_cap_mb=0.0005,
        lr=1e-2,
        sharding_factor=factor,
        mixed_precision=precision,
    )
    odd_loss(model, odd_batches(optimizer.world_size, 0)[rank]).backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"to=None: on every rank") if optimizer.world_size > 1 else nullcontext():
        optimizer.state_dict()
    optimizer.consolidate_state_dict(to=None)
    found = [optimizer.state_dict()]
    for to in range(optimizer.world_size):
        optimizer._engine.dicts.forget()
        optimizer.consolidate_state_dict(to)
        found += [optimizer.state_dict()] if to == rank else []
    optimizer.consolidate_state_dict(to=None)
    optimizer.close()
    return found


def same_on_every_rank(results: list[list[dict[str, Any]]], narrow: bool) -> None:
    for everywhere, alone in results:
        assert everywhere["state"]
        assert ("masters" in everywhere) == narrow
        for found in (everywhere, alone):
            assert_same_states(found, results[0][1])
            masters = results[0][1].get("masters", {})
            assert set(found.get("masters", {})) == set(masters)
            for index, value in masters.items():
                assert_same_bits(found["masters"][index], value)


@pytest.mark.parametrize(
    ("stage", "world_size", "factor", "narrow"),
    [
        (0, 3, None, False),
        (1, 3, None, True),
        (1, 4, 1, False),
        (2, 4, 2, True),
        (3, 1, None, False),
        (3, 3, None, False),
        (3, 4, 2, True),
    ],
)
@pytest.mark.by_default("2-4-2-True", "3-1-None-False")
def test_a_dict_for_all_ranks_is_the_one_of_any_rank(
    stage: int, world_size: int, factor: int | None, narrow: bool
) -> None:
    results = on_threads(world_size, lambda transport: consolidated(transport, transport.rank, stage, factor, narrow))
    same_on_every_rank(results, narrow)


@pytest.mark.full
def test_it_is_on_real_processes(gloo: GlooPool) -> None:
    same_on_every_rank(gloo.run(consolidated, 3, None, True, ranks=(0, 1, 2)), True)


@ALL_STAGES
def test_before_the_first_step_there_is_no_state(stage: int) -> None:
    model = locked_build(0)
    optimizer = ZeroOptimizer(model, stage=stage)
    assert len(optimizer.state) == 0
    assert optimizer.state_dict()["state"] == {}
    assert optimizer.describe().bytes["optimizer"] == 0


@ALL_STAGES
@pytest.mark.by_default("2")
def test_states_are_this_ranks_pieces_and_live(stage: int) -> None:
    def program(transport: Transport) -> dict[str, int]:
        model, optimizer = trained(transport, stage, 2)
        found = {}
        for name, p in model.named_parameters():
            state = optimizer.state[p]
            found[name] = state["exp_avg"].numel() if state else 0
            if state:
                assert state["step"] == 2
                state["exp_avg"].fill_(3)
                assert bool((optimizer.state[p]["exp_avg"] == 3).all())
                state["exp_avg"].zero_()
                assert not optimizer.state[p]["exp_avg"].any()
                if stage == 0:
                    assert state["exp_avg"].shape == p.shape
        assert len(optimizer.state) == sum(1 for p in model.parameters() if optimizer.state[p])
        return found

    totals = on_threads(3, program)
    for name, p in locked_build(0).named_parameters():
        idle = name in ("frozen", "unused") or name.startswith("layers.2")
        expected = 0 if idle or p.numel() == 0 else p.numel()
        assert sum(found[name] for found in totals) == expected * (3 if stage == 0 else 1), name


@settings(max_examples=4 + settings.default.max_examples // 16)  # each trains four times
@given(st.data())
def test_training_on_from_a_saved_dict_is_exact_at_another_stage_and_number_of_ranks(data: st.DataObject) -> None:
    """a + b steps = a steps, save, load elsewhere (or into the class itself, or from it), b steps."""
    from ..programs import CLASSES

    name = data.draw(st.sampled_from(sorted(CLASSES)))
    cls, arguments = CLASSES[name]
    first, second = (
        data.draw(st.sampled_from(["plain", *((w, s) for w in (1, 2, 3, 5) for s in (0, 1, 2))])) for _ in "ab"
    )
    caps = [data.draw(st.sampled_from([1e-6, 0.0005, 25.0])) for _ in "ab"]

    def run(where: Any, cap: float, steps: range, weights: Any, states: Any) -> tuple[Any, Any]:
        if where == "plain":
            return plain_run(steps, weights, states)

        def program(transport: Transport) -> tuple[Any, Any]:
            model = locked_build(0)
            if weights is not None:
                model.load_state_dict(weights)
            optimizer = ZeroOptimizer(
                model, cls, stage=where[1], process_group=transport, bucket_cap_mb=cap, divisor=30, **arguments
            )
            if states is not None:
                optimizer.load_state_dict(copy.deepcopy(states))
            for step in steps:
                optimizer.zero_grad()
                for batch in share(odd_batches(30, step), transport.rank, where[0]):
                    odd_loss(model, batch).backward()
                optimizer.step()
            optimizer.consolidate_state_dict(where[0] - 1)
            last = transport.rank == where[0] - 1
            return copy.deepcopy(model.state_dict()), optimizer.state_dict() if last else None

        return on_threads(where[0], program, timeout=10)[-1]

    def plain_run(steps: range, weights: Any, states: Any) -> tuple[Any, Any]:
        model = locked_build(0)
        if weights is not None:
            model.load_state_dict(weights)
        optimizer = cls(model.parameters(), **arguments)
        if states is not None:
            optimizer.load_state_dict(copy.deepcopy(states))
        for step in steps:
            optimizer.zero_grad()
            plain_step(model, optimizer, odd_loss, odd_batches(30, step), 30)
        return model.state_dict(), optimizer.state_dict()

    weights, states = run(first, caps[0], range(2), None, None)
    weights, states = run(second, caps[1], range(2, 3), weights, states)
    plain_weights, plain_states = plain_run(range(3), None, None)
    for key, value in plain_weights.items():
        assert_same_bits(weights[key], value, key)
    assert_same_states(states, plain_states)


def test_a_saved_dict_has_torchs_own_form_and_names() -> None:
    model = locked_build(0)
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, lr=1e-2)
    odd_loss(model, odd_batches(1)[0]).backward()
    optimizer.step()
    plain = locked_build(0)
    adamw = torch.optim.AdamW(plain.named_parameters(), lr=1e-2)
    odd_loss(plain, odd_batches(1)[0]).backward()
    adamw.step()
    ours, theirs = optimizer.state_dict(), adamw.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert_same_states(ours, theirs)
    for index, state in theirs["state"].items():
        for key, value in state.items():
            assert ours["state"][index][key].stride() == value.stride(), (index, key)
