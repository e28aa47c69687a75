"""Optimizer states have torch's own form and strides, are made, shared and called as those of torch."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zero
from collectives import Transport, on_threads, solo
from zero import MixedPrecision, ZeroOptimizer, open_checkpoint
from zero.checkpoint.format.tensorfile import STRIDES
from zero.core.bits import copied

from ..checkpoint.saved import OPTIMIZER, forge, rewrite_header
from ..support.errors import error_of
from ..support.loops import seeded
from ..support.models import build as locked_build
from ..support.models import odd_batches, odd_loss
from ..support.plain import assert_same_bits, assert_same_states, assert_same_value
from ..support.rows import rows
from ..support.shampoo import Rotated
from ..support.sides import Side, same_as_plain
from ..support.trainings import SGD, Two


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_before_the_first_step_there_is_no_state(stage: int) -> None:
    optimizer = ZeroOptimizer(locked_build(0), stage=stage)
    assert len(optimizer.state) == 0
    assert optimizer.state_dict()["state"] == {}
    assert optimizer.describe().bytes["optimizer"] == 0


class Narrow(torch.optim.SGD):
    """Keeps the momentum in bf16 between steps."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for state in self.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].bfloat16()


def test_a_saved_dict_has_torchs_own_form_and_names() -> None:
    """A state may be narrower than its parameter."""
    given: tuple[tuple[Any, dict[str, Any]], ...] = (
        (torch.optim.AdamW, {"lr": 1e-2}),
        (Narrow, {"lr": 0.1, "momentum": 0.9, "foreach": False}),
    )
    for cls, arguments in given:
        model, plain = locked_build(0), locked_build(0)
        optimizer, reference = ZeroOptimizer(model, cls, **arguments), cls(plain.named_parameters(), **arguments)
        for each, by in ((model, optimizer), (plain, reference)):
            for step in range(2):
                by.zero_grad()
                odd_loss(each, odd_batches(1, step)[0]).backward()  # type: ignore[no-untyped-call]
                by.step()
        ours, theirs = optimizer.state_dict(), reference.state_dict()
        assert ours["param_groups"] == theirs["param_groups"]
        assert_same_states(ours, theirs)
        for index, state in theirs["state"].items():
            for key, value in state.items():
                assert ours["state"][index][key].stride() == value.stride(), (index, key)


@pytest.mark.law("user objects")
def test_loading_shares_nothing_with_the_dict_and_saving_nothing_with_the_optimizer() -> None:
    model = Two()
    optimizer = ZeroOptimizer(model, SGD, lr=torch.tensor(0.3), momentum=0.9)
    model(1.0).backward()
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"].clear()
    assert optimizer.state_dict()["state"]
    theirs = SGD(Two().parameters(), lr=torch.tensor(0.25), momentum=0.9).state_dict()
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

    found = with_hooks(ZeroOptimizer(Two(), SGD, lr=0.1))
    assert found == with_hooks(SGD(Two().parameters(), lr=0.1))
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


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.late, self.unused = (nn.Parameter(torch.arange(1.0, 40.0) / n) for n in (3, 7, 9))

    def forward(self, scale: float) -> torch.Tensor:
        return ((self.first + self.late) * scale).sin().sum()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_adagrad_makes_the_states_of_a_later_group_in_the_step(stage: int) -> None:
    """So a parameter that is never used has none, as in torch. Nor has one whose states were reset."""

    def loop(side: Side) -> Any:
        model, optimizer, found = side.model, side.optimizer, list[Any]()
        optimizer.add_param_group({"params": [model.late, model.unused], "lr": 0.05})
        optimizer.add_param_group({"params": [], "lr": 0.3})
        for step in range(3):
            side.train(lambda model, rank, step=step: model(step + rank))  # type: ignore[misc]
            side.step()
            side.clear()
            if step == 1 and isinstance(optimizer, ZeroOptimizer):
                optimizer.reset_states([model.late])
            elif step == 1:
                del optimizer.state[model.late]
            if isinstance(optimizer, ZeroOptimizer):
                optimizer.consolidate_state_dict(to=None)
            states = copy.deepcopy(optimizer.state_dict()["state"])
            found.append([(index, states[index]["step"], states[index]["sum"]) for index in sorted(states)])
        return found

    given = {"settings": {"stage": stage}, "groups": lambda model: [model.first], "initial_accumulator_value": 0.1}
    same_as_plain(loop, Three, torch.optim.Adagrad, 1 + stage % 3, lr=0.1, **given)


class NeedsStates(SGD):
    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["momentum_buffer"] = torch.ones_like(p)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.data.sub_(self.state[p]["momentum_buffer"] * p.grad)


def test_a_class_that_makes_all_states_before_a_step_makes_those_of_a_later_group_at_once() -> None:
    model = Three()
    optimizer = ZeroOptimizer([model.first], NeedsStates, lr=0.1, momentum=0.9)
    optimizer.add_param_group({"params": [model.late]})
    assert sorted(optimizer.state_dict()["state"]) == [0, 1]
    optimizer.close()


def test_groups_that_share_a_learning_rate_share_the_loaded_one(tmp_path: Path) -> None:
    """In a dict, and in a checkpoint. One that is only equal stays another."""
    model = Three()
    others = [{"params": [model.late]}, {"params": [model.unused], "lr": torch.tensor(0.3)}]
    groups: list[dict[str, Any]] = [{"params": [model.first]}, *others]
    optimizer = ZeroOptimizer(groups, torch.optim.AdamW, module=model, lr=torch.tensor(0.3))
    saved = optimizer.state_dict()
    zero.save(tmp_path / "saved", optimizer)
    for load in (optimizer.load_state_dict, lambda _: zero.load(tmp_path / "saved", optimizer)):
        before = optimizer.param_groups[0]["lr"]
        load(saved)
        for found in (saved["param_groups"], optimizer.param_groups):
            assert [found[n]["lr"] is found[0]["lr"] for n in range(3)] == [True, True, False]
        assert all(optimizer.param_groups[0]["lr"] is not other for other in (before, saved["param_groups"][0]["lr"]))


WIDTH, LAYERS = 67, 5
PSI = LAYERS * (WIDTH * WIDTH + WIDTH)


def backward(model: Any) -> None:
    model(torch.ones(2, WIDTH)).float().square().sum().backward()


@pytest.mark.law("memory")
@pytest.mark.law("traffic")
@pytest.mark.parametrize(
    ("stage", "world_size", "narrow"),
    rows([(1, 3, False), (0, 2, True), (3, 4, True)], [(0, 2, False), (2, 3, True), (3, 3, False)]),
)
def test_bytes_and_traffic_of_a_step_with_no_sync_are_the_closed_form(
    stage: int, world_size: int, narrow: bool
) -> None:
    """Of an element, sharded as the stage says: 4 bytes of parameter and 8 of states; in 16 bits 2 of parameter, and 12
    of states and master weight. Contributions and parameters are sent as they are; the means of stage 0 in 32 bits."""

    def program(transport: Transport) -> tuple[int, int, int]:
        model = seeded(0, lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))))
        precision = MixedPrecision(torch.bfloat16) if narrow else None
        given: dict[str, Any] = {"stage": stage, "bucket_cap_mb": 0.03, "mixed_precision": precision}
        optimizer = ZeroOptimizer(model, torch.optim.Adam, process_group=transport, **given)
        for _ in range(2):
            before = optimizer.traffic
            with optimizer.no_sync():
                backward(model)
            backward(model)
            backward(model)
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        spent, told = optimizer.traffic - before, optimizer.describe()
        optimizer.close()  # a description keeps the facts of its moment
        slack = (6 if narrow else 3) * 64 * (2 * LAYERS + len(told.buckets))
        parameters = (2 if narrow else 4) * PSI // (world_size if stage == 3 else 1)
        states = (12 if narrow else 8) * PSI // (world_size if stage else 1)
        assert abs(told.bytes["parameters"] - parameters) < slack
        assert abs(told.bytes["optimizer"] - states) < slack
        return spent.payload_sent, told.formula_traffic_bytes(3, 2), sum(each.bounds[-1] for each in told.buckets)

    results = on_threads(world_size, program)
    size = 2 if narrow else 4
    expected = size * 2 + 4 if stage == 0 and narrow else size * 4 if stage == 0 else size * 3
    assert results[0][1] == sum(sent for sent, _, _ in results)
    assert stage == 3 or results[0][1] == expected * (world_size - 1) * results[0][2]


pytestmark = pytest.mark.filterwarnings("ignore:Rotated is not element-wise")


def strides_of(value: Any) -> Any:
    """Return a tree with the strides of its tensors and arrays in their place."""
    if isinstance(value, (Tensor, np.ndarray)):
        return tuple(value.stride() if isinstance(value, Tensor) else value.strides)
    if isinstance(value, (list, tuple)):
        return [strides_of(inside) for inside in value]
    return {key: strides_of(inside) for key, inside in value.items()} if isinstance(value, dict) else None


@pytest.mark.law("strides")
def test_those_of_a_state_come_back_and_files_of_before_they_were_noted_are_read(tmp_path: Path) -> None:
    """Files are row-major. The class itself takes the states."""
    model = nn.Linear(9, 9)
    model.weight = nn.Parameter(model.weight.detach().t().contiguous().t())
    optimizer = ZeroOptimizer(model, Rotated, process_group=solo())
    model(torch.ones(2, 9)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before, path = optimizer.state_dict(), tmp_path / "saved"
    zero.save(path, optimizer)
    assert "state.weight.momentum" in json.loads(open_checkpoint(path).header(OPTIMIZER).metadata[STRIDES])
    zero.load(path, optimizer)
    for found in (optimizer.state_dict(), open_checkpoint(path).optimizer_state_dict()):
        assert_same_states(found, before)
        assert strides_of(found["state"]) == strides_of(before["state"])
    rewrite_header(path / OPTIMIZER, **{STRIDES: "{}"})
    forge(path)
    zero.load(path, optimizer)
    assert_same_states(optimizer.state_dict(), before)
    for parameter, state in zip(model.parameters(), optimizer.state_dict()["state"].values(), strict=True):
        assert state["momentum"].stride() == parameter.stride(), "it lies as its parameter does"
        assert all(tensor.is_contiguous() for tensor in (state["first"], *state["bases"], state["one"]))


def test_what_a_user_gives_comes_back_with_its_strides(tmp_path: Path) -> None:
    vectors, part = torch.linalg.eigh(torch.eye(3) + 1)[1], torch.arange(24.0).view(4, 6)[:, :3]
    given = {
        "vectors": vectors,
        "nested": [(vectors.t(), {"conv": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)})],
        "expanded": torch.arange(3.0).expand(2, 3),
        "rows": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "plain": torch.ones(2, 3),
    }
    gaps = {"gaps": part, "turned": part.t(), "windows": torch.arange(6.0).unfold(0, 3, 1)}

    def program(transport: Transport) -> None:
        optimizer = ZeroOptimizer(nn.Linear(2, 2), torch.optim.SGD, process_group=transport)
        zero.save(tmp_path / "saved", optimizer, {**given, **gaps}, {"own": vectors + transport.rank})
        restored = zero.load(tmp_path / "saved", optimizer, rng=False)
        found = dict(restored.state)
        assert strides_of(found) == {**strides_of(given), "gaps": (3, 1), "turned": (1, 3), "windows": (3, 1)}
        assert np.array_equal(found.pop("rows"), given["rows"])
        assert_same_value(found, {key: {**given, **gaps}[key] for key in found}, "the state")
        assert all(copied(value).stride() == found[name].stride() for name, value in gaps.items())
        own = restored.rank_state["own"]
        assert own.stride() == vectors.stride()
        assert_same_value(own, vectors + transport.rank, "the rank's own")

    on_threads(2, program)


FORGED = (  # of "a", which has shape (2, 3)
    *("[]", "no JSON", '{"b": [3, 1]}', '{"a": [1]}', '{"a": [3, 1, 1]}', '{"a": [-3, 1]}', '{"a": [3, 1.0]}'),
    *('{"a": [3, true]}', '{"a": "31"}', '{"a": [1, 1]}', '{"a": [4, 1]}', '{"a": [9000000000000000, 1]}'),
)


def test_strides_that_no_tensor_has_are_an_error(tmp_path: Path) -> None:
    """A parameter may be called as the note is."""
    tied = nn.Module()
    tied.weight = tied.strides = nn.Parameter(torch.ones(2, 3))
    optimizer = ZeroOptimizer(tied, torch.optim.SGD, process_group=solo())
    path = tmp_path / "saved"
    zero.save(path, optimizer, {"a": torch.zeros(2, 3)})
    assert open_checkpoint(path).model_state_dict().keys() == {"weight", "strides"}
    for note in FORGED:
        rewrite_header(path / "state.safetensors", **{STRIDES: note})
        forge(path)
        for read in (lambda: open_checkpoint(path).state, lambda: zero.load(path, optimizer)):
            assert "state.safetensors: its strides" in error_of(read)


def test_a_dict_that_was_consolidated_before_states_were_reset_is_not_shown_any_more() -> None:
    def program(transport: Transport) -> str:
        model = locked_build(0)
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=1, process_group=transport)
        optimizer.consolidate_state_dict(0)
        optimizer.reset_states([model.last.weight])
        return error_of(optimizer.state_dict)

    assert all("consolidate_state_dict" in told for told in on_threads(2, program))
