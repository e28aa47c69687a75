"""Optimizer states: which rank has them, and training on from a saved dict, at any stage and on any number of ranks."""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from collectives import Transport, on_threads
from zero import MixedPrecision, ZeroOptimizer, load, save
from zero.checkpoint.format.manifest import NAME

from ..checkpoint.saved import edit_manifest
from ..support.models import odd_batches, odd_loss
from ..support.parts import engine_of
from ..support.plain import assert_same_bits, assert_same_model, assert_same_states, plain_step, share
from ..support.pool import GlooPool
from ..support.programs import locked_build
from ..support.small import TwoVectors, adam_steps
from ..support.trainings import ALL_STAGES, SGD, Two, trained
from ..test_errors import linear


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
    expected = 2 * model.a.detach()  # the first momentum buffer is the gradient itself
    optimizer.step()
    assert_same_bits(optimizer.state_dict()["state"][0]["momentum_buffer"], expected)
    assert bool(expected.any())


def consolidated(transport: Any, rank: int, stage: int, factor: int | None, narrow: bool) -> list[dict[str, Any]]:
    """Return this rank's dict after `consolidate_state_dict(to=None)`, and after ``to=`` this rank."""
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
        engine_of(optimizer).dicts.forget()
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
    """a + b steps must equal a steps, save, load elsewhere (or into the class itself, or from it), b steps."""
    from ..support.programs import CLASSES

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


def test_a_state_dict_of_another_class_with_equal_options_changes_nothing() -> None:
    model = linear()
    optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    foreign = copy.deepcopy(before)
    foreign["state"][0]["square_avg"] = torch.zeros(3, 3)
    with pytest.raises(ValueError, match="state 'square_avg' of 'weight' belongs to another optimizer class"):
        optimizer.load_state_dict(foreign)
    assert_same_states(optimizer.state_dict(), before)


def test_hooks_on_saving_and_loading_are_called_as_torch_calls_them() -> None:
    def with_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
        calls: list[Any] = []
        optimizer.register_state_dict_pre_hook(lambda _: calls.append("before saving"))
        optimizer.register_state_dict_post_hook(lambda _, found: {**found, "mine": 1})
        optimizer.register_state_dict_post_hook(lambda _, found: calls.append(("saved", sorted(found))))
        optimizer.register_load_state_dict_pre_hook(lambda _, given: {k: v for k, v in given.items() if k != "mine"})
        optimizer.register_load_state_dict_pre_hook(lambda _, given: calls.append(("loading", sorted(given))))
        optimizer.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
        saved = optimizer.state_dict()
        assert saved["mine"] == 1
        optimizer.load_state_dict(saved)
        return calls

    model, plain = linear(), linear()
    found = with_hooks(ZeroOptimizer(model, torch.optim.SGD, lr=0.1))
    assert found == with_hooks(torch.optim.SGD(plain.parameters(), lr=0.1))
    assert len(found) == 4


def test_states_of_parameters_without_elements_are_told_apart() -> None:
    """They all lie at address 0, so an address cannot identify them."""
    model = nn.ParameterDict({name: torch.zeros(0) for name in ("first", "second")})
    model["third"] = nn.Parameter(torch.ones(3))
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        loss = model["third"].sum() + model["second"].sum()
        (loss + model["first"].sum() if step else loss).backward()
        optimizer.step()
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["param_names"] == ["first", "second", "third"]
    assert [int(saved["state"][index]["step"]) for index in range(3)] == [1, 2, 2]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_parameter_that_was_left_out_of_a_step_keeps_its_own_count(stage: int) -> None:
    """Even if its neighbour in the same flat tensor took part."""

    def train(model: nn.ParameterList, optimizer: torch.optim.Optimizer, scales: list[float], divisor: float) -> None:
        for step in range(4):
            optimizer.zero_grad()
            used = model if step != 1 else model[:1]
            for scale in scales:
                torch.stack([(p * scale).square().sum() for p in used]).sum().backward()
            for p in model:
                if p.grad is not None and divisor != 1:
                    p.grad.div_(divisor)
            optimizer.step()

    def build() -> nn.ParameterList:
        return nn.ParameterList([torch.arange(32.0) + number for number in range(3)])

    def program(transport: Transport) -> nn.Module:
        model = build()
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=stage, process_group=transport, lr=0.1)
        train(model, optimizer, [1.0 + transport.rank], 1)
        return model

    plain = build()
    train(plain, torch.optim.AdamW(plain.parameters(), lr=0.1), [1.0, 2.0], 2)
    for model in on_threads(2, program, timeout=5):
        assert_same_model(model, plain)


@pytest.mark.parametrize(("stage", "world_size"), [(0, 2), (1, 3), (2, 3), (3, 3)])
def test_training_goes_on_from_a_saved_dict_as_if_it_had_not_stopped(stage: int, world_size: int) -> None:
    """In a new optimizer, whose param groups have no options except those of the dict."""

    def run(steps: range, weights: Any, states: Any) -> Any:
        def program(transport: Transport) -> Any:
            model = TwoVectors()
            if weights is not None:
                model.load_state_dict(weights)
            optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=stage, process_group=transport, lr=9.0)
            if states is not None:
                optimizer.load_state_dict(states)
                assert optimizer.param_groups[0]["lr"] == 0.05
            adam_steps(model, optimizer, [1.0 + transport.rank], steps)
            optimizer.consolidate_state_dict(to=0)
            saved = optimizer.state_dict() if transport.rank == 0 else None
            optimizer.close()
            return model.state_dict(), saved

        return on_threads(world_size, program, timeout=5)[0]

    weights, states = run(range(3, 5), *run(range(3), None, None))
    plain = TwoVectors()
    adamw = torch.optim.AdamW(plain.parameters(), lr=9.0)
    adam_steps(plain, adamw, [1.0 + rank for rank in range(world_size)], range(5), world_size)
    for name, value in plain.state_dict().items():
        assert_same_bits(weights[name], value, name)
    assert_same_states(states, adamw.state_dict())


# -- dicts of older versions -------------------------------------------------------------------------------------------

ADAPTING = {
    name: cls
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type)
    and issubclass(cls, torch.optim.Optimizer)
    and cls.__setstate__ is not torch.optim.Optimizer.__setstate__
}


def small(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def step_small(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, ranks: range, divisor: int = 1) -> None:
    for rank in ranks:
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x).square().mean().backward()
    for p in model.parameters() if divisor != 1 else ():
        assert p.grad is not None
        p.grad.div_(divisor)
    optimizer.step()
    optimizer.zero_grad()


def older(cls: type[torch.optim.Optimizer], saved: dict[str, Any], how: str) -> list[dict[str, Any]]:
    """Return dicts as older versions of the class have saved them, which it completes by itself."""
    found = []
    for key in saved["param_groups"][0]:
        without = copy.deepcopy(saved)
        del without["param_groups"][0][key]
        plain = cls(small().parameters())
        if key != "params":
            plain.load_state_dict(without)
            found += [key] if key in plain.param_groups[0] else []
    assert found
    dropped = [found] if how == "all at once" else [[key] for key in found]
    dicts = [copy.deepcopy(saved) for _ in dropped]
    for each, keys in zip(dicts, dropped, strict=True):
        for key in keys:
            del each["param_groups"][0][key]
        for state in each["state"].values() if how == "all at once" else ():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() == 0:
                    state[name] = int(value) if name == "step" else float(value)
    return dicts


@pytest.mark.parametrize("how", ["all at once", "one by one"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ADAPTING)
@pytest.mark.by_default("Adam-3-all at once", "ASGD-0-all at once", "RMSprop-1-all at once", "SGD-2-all at once")
@pytest.mark.filterwarnings("ignore:Adafactor is not element-wise")
def test_a_dict_of_an_older_version_is_loaded_as_its_class_loads_it(name: str, stage: int, how: str) -> None:
    cls, arguments = ADAPTING[name], {"momentum": 0.9} if name == "SGD" else {}
    begun = small()
    optimizer = cls(begun.named_parameters(), **arguments)
    for step in range(2):
        step_small(begun, optimizer, step, range(2), 2)
    expected = []
    dicts = older(cls, optimizer.state_dict(), how)
    for state_dict in dicts:
        model = copy.deepcopy(begun)
        plain = cls(model.named_parameters(), **arguments)
        plain.load_state_dict(copy.deepcopy(state_dict))
        for step in (2, 3):
            step_small(model, plain, step, range(2), 2)
        expected.append((model, plain.state_dict()))

    def program(transport: Transport) -> list[tuple[nn.Module, dict[str, Any]]]:
        results = []
        for state_dict in dicts:
            model, before = copy.deepcopy(begun), copy.deepcopy(state_dict)
            optimizer = ZeroOptimizer(model, cls, stage=stage, process_group=transport, **arguments)
            optimizer.load_state_dict(state_dict)
            assert repr(state_dict) == repr(before)
            for step in (2, 3):
                step_small(model, optimizer, step, range(transport.rank, transport.rank + 1))
            optimizer.consolidate_state_dict(None)
            results.append((model, optimizer.state_dict()))
            optimizer.close()
        return results

    for results in on_threads(2, program):
        for (model, states), (plain_model, plain_states) in zip(results, expected, strict=True):
            assert_same_model(model, plain_model)
            assert_same_states(states, plain_states)
            assert states["param_groups"] == plain_states["param_groups"]


def old_adamw(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Take two steps. Return the dict as torch 1.8 would have saved it."""
    for step in range(2):
        step_small(model, optimizer, step, range(2), 2)
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        for key in ("maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"):
            del group[key]
        group["initial_lr"] = 0.1  # of a scheduler
    for state in saved["state"].values():
        state["step"] = int(state["step"])
    return saved


def test_so_is_a_checkpoint_that_was_imported_from_one(tmp_path: Path) -> None:
    """Earlier releases have written such checkpoints: without a class, and with the options of the old dict."""
    plain = small()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    saved = old_adamw(plain, optimizer)
    optimizer.load_state_dict(saved)
    first = small()
    first.load_state_dict(plain.state_dict())
    one = ZeroOptimizer(first, torch.optim.AdamW)
    one.load_state_dict(saved)
    save(tmp_path / "saved", one)
    (group,) = json.loads((tmp_path / "saved" / NAME).read_bytes())["param_groups"]
    old = {key: value for key, value in group.items() if key in saved["param_groups"][0]}
    assert "decoupled_weight_decay" in group.keys() - old.keys()
    edit_manifest(tmp_path / "saved", param_groups=[old])
    step_small(plain, optimizer, 2, range(2), 2)

    def program(transport: Transport) -> tuple[nn.Module, dict[str, Any]]:
        model = small(1)
        ours = ZeroOptimizer(model, torch.optim.AdamW, stage=3, process_group=transport)
        load(tmp_path / "saved", ours, rng=False)
        step_small(model, ours, 2, range(transport.rank, transport.rank + 1))
        ours.consolidate_state_dict(None)
        ours.close()
        return model, engine_of(ours).dicts.dict_of(ours.param_groups)

    for model, states in on_threads(2, program):
        assert_same_model(model, plain)
        assert_same_states(states, optimizer.state_dict())


def test_so_are_the_dicts_of_several_classes() -> None:
    plain = small()
    optimizers = torch.optim.AdamW(plain[0].parameters()), torch.optim.SGD(plain[2].parameters(), lr=0.1, momentum=0.9)
    model = small()
    groups = [
        {"params": list(model[0].parameters())},
        {"params": list(model[2].parameters()), "optimizer_class": torch.optim.SGD, "lr": 0.1, "momentum": 0.9},
    ]
    ours = ZeroOptimizer(groups, torch.optim.AdamW, module=model)
    step_small(model, ours, 0, range(1))
    saved = {name: copy.deepcopy(found) for name, found in ours.state_dict().items()}
    for state in saved["torch.optim.adamw.AdamW"]["state"].values():
        state["step"] = 7
    for found, keys in zip(saved.values(), (("amsgrad", "fused"), ("nesterov", "fused")), strict=True):
        for key in keys:
            del found["param_groups"][0][key]
    ours.load_state_dict(saved)
    for optimizer, state_dict in zip(optimizers, saved.values(), strict=True):
        optimizer.load_state_dict(copy.deepcopy(state_dict))
    plain.load_state_dict(model.state_dict())
    for x in torch.randn(2, 3, 5):
        for each in (model, plain):
            each(x).square().mean().backward()
        for optimizer in (ours, *optimizers):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_model(model, plain)
    for found, optimizer in zip(ours.state_dict().values(), optimizers, strict=True):
        assert_same_states(found, optimizer.state_dict())


class MakesAnew(torch.optim.SGD):
    """Makes its large state anew when it loads a dict."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for of_parameter in self.state.values():
            of_parameter["momentum_buffer"] = of_parameter["momentum_buffer"] * 2


class Countless(torch.optim.Adam):
    """Keeps no step count, without which it cannot load what it has saved."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(self.state[p].setdefault("sum", torch.zeros_like(p)).add_(p.grad))


def test_a_class_that_cannot_load_what_it_has_saved_goes_on_here() -> None:
    model, loaded = small(), small(1)
    optimizer, later = ZeroOptimizer(model, Countless), ZeroOptimizer(loaded, Countless)
    step_small(model, optimizer, 0, range(1))
    saved = optimizer.state_dict()
    with pytest.raises(KeyError, match="step"):
        Countless(small().parameters()).load_state_dict(copy.deepcopy(saved))
    loaded.load_state_dict(model.state_dict())
    later.load_state_dict(saved)
    for trained_on, by in ((model, optimizer), (loaded, later)):
        step_small(trained_on, by, 1, range(1))
    assert_same_model(loaded, model)


OTHERS: dict[str, tuple[type[torch.optim.Optimizer], type[torch.optim.Optimizer], dict[str, Any], str]] = {
    "unknown": (torch.optim.NAdam, torch.optim.Adam, {}, "has no 'amsgrad', but 'momentum_decay', which Adam does not"),
    "states": (torch.optim.Adamax, torch.optim.Adam, {}, "state 'exp_inf' of '0.weight' belongs to another optimizer"),
    "failing": (torch.optim.SGD, torch.optim.Adam, {"momentum": 0.9}, "has no 'amsgrad': it belongs to another class"),
    "anew": (
        torch.optim.SGD,
        MakesAnew,
        {"momentum": 0.9},
        "MakesAnew makes the state 'momentum_buffer' of '0.weight'",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
@pytest.mark.by_default
def test_a_dict_that_no_version_of_the_class_has_saved_changes_nothing(case: str) -> None:
    saver, loader, arguments, words = OTHERS[case]
    plain, model = small(), small()
    saving = saver(plain.parameters(), **arguments)
    step_small(plain, saving, 0, range(1))
    optimizer = ZeroOptimizer(model, loader, lr=0.5, **(arguments if loader is MakesAnew else {}))
    step_small(model, optimizer, 0, range(1))
    before = copy.deepcopy(optimizer.state_dict())
    foreign = saving.state_dict()
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(foreign)
    assert_same_states(optimizer.state_dict(), before)
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    assert_same_states(foreign, saving.state_dict())
