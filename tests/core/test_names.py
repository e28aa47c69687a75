"""Names are those of the model without torch's wrappers, everywhere, and names with wrappers are understood."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import zero
from collectives import solo
from zero import ShardedAverage, ZeroOptimizer, open_checkpoint
from zero.core.names import (
    all_without_wrappers,
    by_known_name,
    named_buffers,
    named_parameters,
    named_parts,
    named_tensors,
    remark_on_prefix,
)

from ..support.plain import assert_same_bits, assert_same_model, assert_same_states

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("offset", torch.arange(3.0))

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.inner(x)) + self.offset

    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: int) -> None:
        assert state == 1


class Net(nn.Module):
    """A model with units, a buffer, a tie and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 3), nn.Linear(3, 3)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        for number, parameter in enumerate(self.parameters()):
            parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class OfTheUser(nn.Module):
    """A module of the user's own that keeps another one under the name that torch's wrapper uses."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self._orig_mod = inside

    def forward(self, x: Tensor) -> Any:
        return self._orig_mod(x)


def compiled(module: nn.Module) -> Any:
    """Return the module in the wrapper of `torch.compile`, without the time of a compilation."""
    made: Any = torch.compiler.disable(module)  # type: ignore[no-untyped-call]
    return made


def with_blocks(wrap: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    def wrapped(model: Any) -> Any:
        model.blocks = nn.ModuleList([wrap(block) for block in model.blocks])
        return model

    return wrapped


WRAPPED: dict[str, Callable[[nn.Module], Any]] = {
    "torch.compile(model)": compiled,
    "torch.compile(block)": with_blocks(compiled),
    "both": lambda model: compiled(with_blocks(compiled)(model)),
    "checkpoint_wrapper(block)": with_blocks(checkpoint_wrapper),
    "torch.compile(checkpoint_wrapper(block))": with_blocks(lambda block: compiled(checkpoint_wrapper(block))),
}
EVERY_WRAPPER = pytest.mark.parametrize("wrapper", WRAPPED)


def trained(model: nn.Module, stage: int) -> tuple[ZeroOptimizer, ShardedAverage]:
    optimizer = ZeroOptimizer(model, stage=stage, process_group=solo(), lr=0.1)
    average = ShardedAverage(optimizer)
    step(model, optimizer)
    average.update_parameters()
    return optimizer, average


def step(model: nn.Module, optimizer: ZeroOptimizer) -> None:
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


# -- names in a module -------------------------------------------------------------------------------------------------


@EVERY_WRAPPER
def test_parts_and_tensors_of_a_wrapped_model_have_the_names_of_the_plain_one(wrapper: str) -> None:
    plain, wrapped = Net(), WRAPPED[wrapper](Net())
    assert [name for name, _ in named_parameters(wrapped)] == [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in named_buffers(wrapped)] == [name for name, _ in plain.named_buffers()]
    twice = [*plain.named_parameters(remove_duplicate=False), *plain.named_buffers(remove_duplicate=False)]
    assert [name for name, _ in named_tensors(wrapped)] == [name for name, _ in twice]
    assert list(dict.fromkeys(name for name, _ in named_parts(wrapped))) == [name for name, _ in plain.named_modules()]


def test_the_wrapper_of_these_tests_is_that_of_torch_compile() -> None:
    assert type(compiled(Net())) is type(torch.compile(Net(), backend="eager"))


def test_a_module_of_the_users_own_keeps_its_name_whatever_that_is() -> None:
    model = OfTheUser(Net())
    assert list(named_parameters(model)) == list(model.named_parameters())
    assert [name for name, _ in named_parts(compiled(model))][:3] == ["", "", "_orig_mod"]


# -- names from elsewhere ----------------------------------------------------------------------------------------------


def test_a_name_with_wrappers_is_that_of_the_model_unless_the_model_has_both() -> None:
    found = by_known_name({"_orig_mod.a": 1, "b._checkpoint_wrapped_module._orig_mod.c": 2, "d": 3}, {"a", "b.c", "d"})
    assert found == {"a": 1, "b.c": 2, "d": 3}
    assert by_known_name({"_orig_mod.a": 1}, {"_orig_mod.a", "a"}) == {"_orig_mod.a": 1}
    assert by_known_name({"_orig_mod.a": 1, "a": 2}, {"a"}) == {"_orig_mod.a": 1, "a": 2}
    assert by_known_name({"_orig_mod.a": 1}, {"b"}) == {"_orig_mod.a": 1}


def test_names_that_a_user_gives_stay_apart() -> None:
    assert all_without_wrappers(["_orig_mod.a", "_orig_mod.b"]) == ["a", "b"]
    assert all_without_wrappers(["_orig_mod.a", "a"]) == ["_orig_mod.a", "a"]
    assert all_without_wrappers(["_orig_mod"]) == ["_orig_mod"]


def test_the_prefix_of_ddp_is_named_if_it_explains_all_names() -> None:
    assert "begin with 'module.'" in remark_on_prefix(["module.a", "_orig_mod.module.b"], {"a", "b", "c"})
    assert remark_on_prefix(["module.a", "b"], {"a", "b"}) == ""
    assert remark_on_prefix(["module.a"], {"c"}) == ""
    assert remark_on_prefix([], {"a"}) == ""


# -- everywhere --------------------------------------------------------------------------------------------------------


@STAGES
@EVERY_WRAPPER
@pytest.mark.by_default("torch.compile(model)-2", "both-3", "checkpoint_wrapper(block)-1")
def test_reports_dicts_checkpoints_and_errors_of_a_wrapped_model_are_those_of_the_plain_one(
    wrapper: str, stage: int, tmp_path: Path
) -> None:
    found = []
    for wrap in (lambda model: model, WRAPPED[wrapper]):
        model = wrap(Net())
        optimizer, average = trained(model, stage)
        saving = zero.save(tmp_path / f"saved-{len(found)}", optimizer)
        storage = optimizer._storage
        units = [] if storage.manager is None else [unit.name for unit in storage.manager.units]
        group, checkpoint = optimizer.param_groups[0], open_checkpoint(saving.path)
        within = group["params"][group["param_names"].index("blocks.0.inner.weight")]
        within.grad = torch.ones(within.shape)
        with pytest.raises(RuntimeError, match=r"'blocks\.0\.inner\.weight' was assigned from outside") as raised:
            optimizer.step()
        within.grad = None
        found.append(
            (
                checkpoint.content,
                checkpoint.not_saved,
                optimizer.state_dict()["param_groups"],
                group["param_names"],
                [bucket.names for bucket in optimizer.describe().buckets],
                list(average.gather() or ()),
                units,
                str(raised.value),
            )
        )
    assert found[0] == found[1]


@STAGES
@pytest.mark.parametrize("old", [False, True])
@EVERY_WRAPPER
@pytest.mark.by_default("torch.compile(block)-False-3", "torch.compile(model)-True-2")
@pytest.mark.filterwarnings("ignore:not restored from .*_extra_state")
def test_checkpoints_and_dicts_fit_the_model_with_other_wrappers_and_none(
    wrapper: str, old: bool, stage: int, tmp_path: Path
) -> None:
    """``old``: what was saved has the wrapper's name inside its names, as the first checkpoints of such a model had."""
    ways: list[Callable[[nn.Module], Any]] = [WRAPPED[wrapper], lambda model: model]
    saved_by: list[Callable[[nn.Module], Any]] = [with_blocks(OfTheUser), OfTheUser] if old else ways
    expected = Net()
    optimizer, _ = trained(expected, stage)
    step(expected, optimizer)
    optimizer.close()
    for number, before in enumerate(saved_by):
        model = before(Net())
        optimizer, average = trained(model, stage)
        zero.save(tmp_path / f"{number}", optimizer)
        averaged, states = average.gather(), optimizer.state_dict()
        assert any("_orig_mod" in name for name in states["param_groups"][0]["param_names"]) == old
        optimizer.close()
        for after in ways:
            with torch.random.fork_rng():
                fresh = after(Net())
            optimizer = ZeroOptimizer(fresh, stage=stage, process_group=solo(), lr=9.0)
            average = ShardedAverage(optimizer)
            zero.load(tmp_path / f"{number}", optimizer)
            assert_same_states(optimizer.state_dict(), states)
            for mine, theirs in zip((average.gather() or {}).values(), (averaged or {}).values(), strict=True):
                assert_same_bits(mine, theirs)
            optimizer.load_state_dict(states)
            step(fresh, optimizer)
            optimizer.close()
            assert_same_model(fresh, expected)


def on_meta(wrap: Callable[[nn.Module], Any]) -> Any:
    with torch.device("meta"):
        return wrap(Net())


@STAGES
@EVERY_WRAPPER
@pytest.mark.by_default("both-3", "torch.compile(block)-1")
def test_a_model_on_meta_takes_a_state_dict_with_and_without_wrappers(wrapper: str, stage: int) -> None:
    wrap = WRAPPED[wrapper]
    for before, after in ((wrap, lambda model: model), (lambda model: model, wrap), (wrap, wrap)):
        values = before(Net()).state_dict()
        model = on_meta(after)
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        arguments: dict[str, Any] = {"stage": stage, "process_group": solo()}
        ZeroOptimizer(model, init_state_dict=tensors, **arguments).close()
        assert_same_model(model, Net())


@STAGES
def test_a_child_whose_key_has_a_dot_and_names_of_the_class_s_own_are_taken_as_they_are(stage: int) -> None:
    class Dotted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            setattr(self, "a.b", nn.Linear(3, 3))

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = getattr(self, "a.b")(x)
            return made

    class Prefixed(Dotted):
        def named_modules(self, *args: Any, **kwargs: Any) -> Any:
            return ((f"net.{name}" if name else "net", part) for name, part in super().named_modules(*args, **kwargs))

    for made in (Dotted(), Prefixed()):
        optimizer = ZeroOptimizer(made, stage=stage, process_group=solo(), lr=0.1)
        made(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.close()


# -- names that a user gives -------------------------------------------------------------------------------------------


def test_names_of_a_compiled_model_that_a_user_lists_fit_the_checkpoint_of_the_plain_one(tmp_path: Path) -> None:
    """Without the module, the names that the user gives are the only ones; his param groups keep them."""
    model = compiled(Net())
    listed = ZeroOptimizer(model.named_parameters(), stage=2, process_group=solo(), lr=0.1)
    step(model, listed)
    assert listed.param_groups[0]["param_names"][0] == "_orig_mod.frozen"
    zero.save(tmp_path / "listed", listed)
    plain = Net()
    alone = ZeroOptimizer(plain.named_parameters(), stage=2, process_group=solo(), lr=9.0)
    zero.load(tmp_path / "listed", alone)
    assert_same_states(alone.state_dict(), listed.state_dict())
    assert_same_model(plain, model)


# -- the prefix of DistributedDataParallel -----------------------------------------------------------------------------


def with_prefix(names: dict[str, Any]) -> dict[str, Any]:
    return {f"module.{name}": value for name, value in names.items()}


PREFIX = r"begin with 'module\.', which DistributedDataParallel puts before those of the model: take that away"


def test_a_state_dict_with_the_prefix_of_ddp_is_refused_by_its_name() -> None:
    values = {name: value for name, value in Net().state_dict().items() if isinstance(value, Tensor)}
    with pytest.raises(ValueError, match=f"which the model has not.*{PREFIX}"):
        ZeroOptimizer(on_meta(compiled), process_group=solo(), init_state_dict=with_prefix(values))


def test_an_optimizers_dict_with_the_prefix_of_ddp_is_refused_by_its_name() -> None:
    optimizer, _ = trained(Net(), 2)
    saved = optimizer.state_dict()
    named = saved["param_groups"][0]
    named["param_names"] = [f"module.{name}" for name in named["param_names"]]
    with pytest.raises(ValueError, match=f"belongs to another model.*{PREFIX}"):
        optimizer.load_state_dict(saved)


def test_a_checkpoint_with_the_prefix_of_ddp_is_refused_with_the_way_to_load_it(tmp_path: Path) -> None:
    listed = with_prefix(dict(Net().named_parameters()))
    zero.save(tmp_path / "saved", ZeroOptimizer(listed.items(), stage=1, process_group=solo()))
    optimizer = ZeroOptimizer(Net().named_parameters(), stage=1, process_group=solo())
    with pytest.raises(ValueError, match=rf"{PREFIX}, in the dicts that zero\.open_checkpoint reads, and load these"):
        zero.load(tmp_path / "saved", optimizer)
