"""An optimizer leaves nothing on parameters, in the user's objects and in the process; states follow their arrows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from collectives import CollectiveError, Transport, on_threads
from zero import ZeroOptimizer
from zero.core.parameter_specs import is_released
from zero.gradients.backward_schedule import BackwardSchedule, Phase
from zero.parameters.gathered.units import GatheredUnit, State
from zero.parameters.unit_manager import Unit

from ..dials.loops import FAILS
from ..dials.record import config_with
from ..support.errors import is_plain
from ..support.limits import BOUND
from ..support.machine.program import Backward, Command, Keep, Step, Wrong, ZeroGrad
from ..support.machine.ranks import Rank
from ..support.models import build, odd_batches, odd_loss
from ..support.plain import assert_same_model, assert_same_states, plain_step
from ..support.rows import rows
from .watched import LOOP, train


def traces(model: nn.Module) -> dict[str, Any]:
    """Return as plain data what can be seen on a model and its parameters, besides values and gradients."""
    found: dict[str, Any] = {}
    for name, p in model.named_parameters():
        found[name] = (sorted(vars(p)), p.requires_grad, p.is_leaf, p.shape, p.dtype, p.retains_grad)
    for name, part in model.named_modules():
        found[f"module {name}"] = (type(part), sorted(vars(part)), part.training, [*part._parameters], [*part._buffers])
    return found


@pytest.mark.law("no traces")
@pytest.mark.parametrize("stage", rows([0, 3], [1, 2]))
def test_nothing_is_written_on_parameters_and_modules(stage: int) -> None:
    pristine = config_with({}).model(0)
    expected, models = traces(pristine), list[nn.Module]()

    def at(_: Command | None, rank: Rank) -> None:
        assert traces(rank.model) == expected
        for name, p in rank.model.named_parameters():
            assert type(p) is nn.Parameter or (stage == 3 and is_released(p)), name
        models.append(rank.model)

    train(stage, at)
    assert models
    for model in models:
        assert traces(model) == expected
        assert is_plain(model)
        for p, like in zip(model.parameters(), pristine.parameters(), strict=True):
            assert (type(p), p.stride(), p.storage_offset()) == (nn.Parameter, like.stride(), 0)
            assert p.untyped_storage().nbytes() == like.untyped_storage().nbytes()


@pytest.mark.law("user objects")
@pytest.mark.parametrize("stage", [1, 3])
def test_what_the_user_gave_is_never_edited(stage: int) -> None:
    model = build(0)
    rate, betas = torch.tensor(1e-2), [0.8, 0.95]
    members = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": members[:5], "lr": rate, "betas": betas},
        {"params": members[5:], "weight_decay": 0.5},
    ]
    before = [{**group, "params": list(group["params"])} for group in groups]
    optimizer = ZeroOptimizer(groups, torch.optim.AdamW, stage=stage, module=model, lr=3e-3)
    odd_loss(model, odd_batches(1)[0]).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.param_groups[1]["lr"] = 0.1
    saved = optimizer.state_dict()
    loaded = copy.deepcopy(saved)
    optimizer.load_state_dict(loaded)
    odd_loss(model, odd_batches(1, 1)[0]).backward()
    optimizer.step()
    optimizer.close()
    assert_same_states(loaded, saved)
    assert loaded["param_groups"] == saved["param_groups"]
    assert [list(group) for group in groups] == [list(group) for group in before]
    for ours, theirs in zip(groups, before, strict=True):
        assert all(a is b for a, b in zip(ours["params"], theirs["params"], strict=True))
        assert {k: v for k, v in ours.items() if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}
    assert (rate.item(), betas) == (torch.tensor(1e-2).item(), [0.8, 0.95])


SETTINGS: list[dict[str, Any]] = [
    {"stage": 0, "optimizer_class": torch.optim.SGD, "lr": 0.1, "momentum": 0.9, "divisor": 3.0},
    {"stage": 1, "optimizer_class": torch.optim.AdamW, "lr": 1e-2, "bucket_cap_mb": 1e-6, "fused": True},
    {"stage": 2, "optimizer_class": torch.optim.RAdam, "collective": "ring", "bucket_cap_mb": 0.0005},
    {"stage": 3, "optimizer_class": torch.optim.NAdam, "divisor": 7.0, "bucket_cap_mb": 0.001},
    {"stage": 3, "optimizer_class": torch.optim.Adagrad, "lr": 0.1, "units": lambda part: isinstance(part, nn.Linear)},
]
"""A ring of two adds two numbers, which has one order."""
OURS = ("stage", "optimizer_class", "divisor", "bucket_cap_mb", "collective", "units")


@pytest.mark.law("side by side")
def test_optimizers_with_different_settings_share_a_process_a_group_and_a_backward() -> None:
    batches = [[odd_batches(1, 10 * step + rank)[0] for rank in range(2)] for step in range(3)]

    def program(transport: Transport) -> list[nn.Module]:
        models = all_models[transport.rank]
        zeros = [ZeroOptimizer(m, process_group=transport, **s) for m, s in zip(models, SETTINGS, strict=True)]
        for step, each in enumerate(batches):
            sum(odd_loss(model, each[transport.rank]) for model in models).backward()  # type: ignore[union-attr]
            order = [*zeros[step:], *zeros[:step]]
            for optimizer in order:
                optimizer.clip_grad_norm_(0.1 * (1 + zeros.index(optimizer)))
            for optimizer in reversed(order):
                optimizer.step()
            for optimizer in order:
                optimizer.zero_grad()
        for optimizer in zeros:
            optimizer.close()
        return models

    all_models: list[list[nn.Module]] = [[build(0) for _ in SETTINGS] for _ in range(2)]
    found = on_threads(2, program, timeout=BOUND)
    for number, settings in enumerate(SETTINGS):
        model = build(0)
        arguments = {key: value for key, value in settings.items() if key not in OURS}
        optimizer = settings["optimizer_class"](model.parameters(), **arguments)
        for each in batches:
            plain_step(model, optimizer, odd_loss, each, settings.get("divisor", 2), 0.1 * (1 + number))
            model.zero_grad()
        for models in found:
            assert_same_model(models[number], model)


def record_transitions(monkeypatch: pytest.MonkeyPatch, cls: type, attribute: str) -> set[tuple[Any, Any]]:
    seen: set[tuple[Any, Any]] = set()

    def record(self: Any, name: str, value: Any) -> None:
        if name == attribute:
            seen.add((vars(self).get(name, value), value))
        object.__setattr__(self, name, value)

    monkeypatch.setattr(cls, "__setattr__", record, raising=False)
    return seen


def a_rank_leaves(command: Command | None, rank: Rank) -> None:
    if isinstance(command, Keep):
        if rank.rank == 0:
            with pytest.raises(CollectiveError):
                rank.do(Backward(9))
        raise OSError("unplugged")


@pytest.mark.law("state transitions")
def test_states_change_only_along_their_arrows(monkeypatch: pytest.MonkeyPatch) -> None:
    units = record_transitions(monkeypatch, GatheredUnit, "state")
    installed = record_transitions(monkeypatch, Unit, "installed")
    phases = record_transitions(monkeypatch, BackwardSchedule, "phase")
    for stage in (0, 3):
        fails = [Wrong(*call) for call in FAILS.items()]
        train(stage, lambda *_: None, Step(), ZeroGrad(), *fails, ZeroGrad(), *LOOP)  # a step without gradients
    with pytest.raises(OSError, match="unplugged"):
        train(3, a_rank_leaves)
    assert {arrow for arrow in units if arrow[0] is not arrow[1]} == {
        (State.SHARDED, State.GATHERING),
        (State.GATHERING, State.UNSHARDED),
        (State.UNSHARDED, State.SHARDED),
    }
    assert installed == {(False, False), (False, True), (True, False)}
    assert {arrow for arrow in phases if arrow[0] is not arrow[1]} == {
        (Phase.OPEN, Phase.DIVIDED),
        (Phase.DIVIDED, Phase.STEPPED),
        (Phase.DIVIDED, Phase.OPEN),
        (Phase.STEPPED, Phase.OPEN),
    }
