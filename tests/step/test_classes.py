"""Several classes in one optimizer: each param group is stepped by its own, and the bits are those of a plain loop that
has an optimizer of each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from collectives import Transport, on_threads, solo
from zero import MixedPrecision, ZeroOptimizer
from zero.commands.cli import main

from ..support.loops import Several
from ..support.plain import assert_same_bits, assert_same_model, assert_same_states
from ..support.pool import GlooPool
from ..support.shampoo import Shampoo
from .test_partition import batch, train, train_plainly

STAGES = (0, 1, 2, 3)
MUON, ADAMW = (f"{cls.__module__}.{cls.__qualname__}" for cls in (torch.optim.Muon, torch.optim.AdamW))


class Model(nn.Module):
    """Matrices and vectors in each block, an unused and a frozen matrix, a tied one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 8)) for _ in range(3))
        self.blocks[2][0].weight = self.blocks[0][0].weight
        self.norm, self.unused, self.frozen = nn.LayerNorm(8), nn.Linear(3, 5), nn.Linear(8, 8)
        self.frozen.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.frozen(self.norm(x))


def model_of(dtype: torch.dtype = torch.float32) -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Model().to(dtype)


def shared(model: nn.Module) -> tuple[list[tuple[str, nn.Parameter]], list[tuple[str, nn.Parameter]]]:
    """Return the matrices of the blocks, and all else."""
    named = list(model.named_parameters())
    matrices = [(name, p) for name, p in named if p.dim() == 2 and name.startswith("blocks")]
    return matrices, [(name, p) for name, p in named if all(p is not q for _, q in matrices)]


def muon_and_adamw(model: nn.Module) -> list[dict[str, Any]]:
    matrices, rest = shared(model)
    return [
        {"params": matrices, "optimizer_class": torch.optim.Muon, "lr": 0.02, "weight_decay": 0.1},
        {"params": rest[::2], "optimizer_class": torch.optim.AdamW, "lr": 0.01},
        {"params": rest[1::2], "optimizer_class": torch.optim.AdamW, "lr": 0.005, "weight_decay": 0.0},
    ]


class PlainLoop:
    """A plain loop with an optimizer of each class."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.model = model_of(dtype)
        matrices, rest = shared(self.model)
        self.muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1)  # type: ignore[arg-type]
        groups = [{"params": rest[::2]}, {"params": rest[1::2], "lr": 0.005, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(groups, lr=0.01)

    def train(self, steps: range) -> None:
        train_plainly(self.model, Several(self.muon, self.adamw), steps)


def build(model: nn.Module, group: Any, stage: int, **arguments: Any) -> ZeroOptimizer:
    return ZeroOptimizer(
        muon_and_adamw(model),
        module=model,
        stage=stage,
        process_group=group,
        bucket_cap_mb=0.002,
        partition=None,
        **arguments,
    )


def on_ranks(world_size: int, run: Callable[[nn.Module, Transport], Any], dtype: torch.dtype = torch.float32) -> Any:
    models = [model_of(dtype) for _ in range(world_size)]
    return on_threads(world_size, lambda transport: run(models[transport.rank], transport), timeout=10)


@pytest.mark.filterwarnings("ignore:Muon is not element-wise")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [1, 2, 3, *(pytest.param(size, marks=pytest.mark.long) for size in (4, 6))])
def test_muon_for_matrices_and_adamw_for_the_rest_give_the_bits_of_the_plain_loop(
    world_size: int, stage: int, dtype: torch.dtype
) -> None:
    plain = PlainLoop(dtype)
    plain.train(range(3))

    def run(model: nn.Module, transport: Transport) -> Any:
        optimizer = build(model, transport, stage)
        train(model, optimizer, range(3))
        optimizer.consolidate_state_dict(None)
        states = optimizer.state_dict()
        optimizer.close()
        return model, states

    for model, states in on_ranks(world_size, run, dtype):
        assert_same_model(model, plain.model)
        assert sorted(states) == [MUON, ADAMW]
        for name, stepped in ((MUON, plain.muon), (ADAMW, plain.adamw)):
            assert_same_states(states[name], stepped.state_dict())
            assert [group["optimizer_class"] for group in states[name]["param_groups"]] == [name] * (
                1 if name == MUON else 2
            )
            stepped.load_state_dict(states[name])  # torch's own class takes it


@pytest.mark.filterwarnings("ignore:Muon is not element-wise")
@pytest.mark.parametrize("stage", STAGES)
def test_it_is_on_processes(gloo: GlooPool, stage: int) -> None:
    plain = PlainLoop()
    plain.train(range(3))
    for found in gloo.run(trained_on_processes, stage, ranks=range(3)):
        for name, parameter in plain.model.named_parameters():
            assert_same_bits(found[name], parameter, name)


def trained_on_processes(group: Any, rank: int, stage: int) -> dict[str, Tensor]:
    model = model_of()
    optimizer = build(model, group, stage)
    train(model, optimizer, range(3))
    optimizer.close()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:Muon is not element-wise")
@pytest.mark.parametrize(("before", "after"), [((3, 3), (2, 1)), ((1, 0), (4, 3)), ((2, 2), (1, 0))])
@pytest.mark.parametrize("by", ["dict", "checkpoint"])
def test_training_goes_on_from_saved_states(
    by: str, before: tuple[int, int], after: tuple[int, int], tmp_path: Path
) -> None:
    def first(model: nn.Module, transport: Transport) -> Any:
        optimizer = build(model, transport, before[1])
        train(model, optimizer, range(2))
        zero.save(tmp_path / "saved", optimizer)
        optimizer.consolidate_state_dict(None)
        states = optimizer.state_dict()
        optimizer.close()
        return model.state_dict(), states

    def second(model: nn.Module, transport: Transport, saved: Any) -> nn.Module:
        if by == "dict":
            model.load_state_dict(saved[0])
        optimizer = build(model, transport, after[1])
        if by == "dict":
            optimizer.load_state_dict(saved[1])
        else:
            zero.load(tmp_path / "saved", optimizer, rng=False)
        train(model, optimizer, range(2, 4))
        optimizer.close()
        return model

    saved = on_ranks(before[0], first)
    plain = PlainLoop()
    plain.train(range(4))
    for model in on_ranks(after[0], partial(second, saved=saved[0])):
        assert_same_model(model, plain.model)


@pytest.mark.filterwarnings("ignore:Muon is not element-wise")
def test_dicts_of_torch_s_own_classes_are_loaded() -> None:
    plain = PlainLoop()
    plain.train(range(2))
    model = model_of()
    model.load_state_dict(plain.model.state_dict())
    optimizer = build(model, solo(), 2)
    optimizer.load_state_dict({MUON: plain.muon.state_dict(), ADAMW: plain.adamw.state_dict()})
    plain.train(range(2, 4))
    train(model, optimizer, range(2, 4))
    optimizer.close()
    assert_same_model(model, plain.model)


@pytest.mark.filterwarnings("ignore:Muon is not element-wise")
def test_a_checkpoint_gives_a_dict_of_each_class_and_so_does_its_export(tmp_path: Path) -> None:
    model = model_of()
    optimizer = build(model, solo(), 3)
    train(model, optimizer, range(2))
    zero.save(tmp_path / "saved", optimizer)
    states = optimizer.state_dict()
    optimizer.close()
    assert main(["checkpoint", "export", str(tmp_path / "saved"), "--to", "torch", str(tmp_path / "file")]) == 0
    exported = torch.load(tmp_path / "file", weights_only=True)["optimizer"]
    for found in (zero.open_checkpoint(tmp_path / "saved").optimizer_state_dict(), exported):
        assert sorted(found) == sorted(states)
        for name, plain in states.items():
            assert_same_states(found[name], plain)
            assert found[name]["param_groups"] == plain["param_groups"]


@pytest.mark.filterwarnings("ignore:Muon is not element-wise")
@pytest.mark.parametrize("stage", STAGES)
def test_two_element_wise_classes_share_no_bucket(stage: int) -> None:
    def run(model: nn.Module, transport: Transport) -> nn.Module:
        matrices, rest = shared(model)
        groups = [{"params": rest}, {"params": matrices, "optimizer_class": torch.optim.SGD, "momentum": 0.9}]
        optimizer = ZeroOptimizer(groups, module=model, stage=stage, process_group=transport)
        train(model, optimizer, range(2))
        optimizer.close()
        return model

    plain = model_of()
    matrices, rest = shared(plain)
    sgd = torch.optim.SGD(matrices, momentum=0.9)  # type: ignore[arg-type]
    train_plainly(plain, Several(torch.optim.AdamW(rest), sgd), range(2))
    for model in on_ranks(3, run):
        assert_same_model(model, plain)


@pytest.mark.filterwarnings("ignore:Muon is not element-wise")
def test_groups_have_the_defaults_of_their_class_and_schedulers_move_all() -> None:
    model = model_of()
    optimizer = build(model, solo(), 2)
    muon, adamw = torch.optim.Muon([torch.zeros(2, 2)]).defaults, torch.optim.AdamW([torch.zeros(1)]).defaults
    given = {"params", "param_names", "optimizer_class"}
    assert [group.keys() - given for group in optimizer.param_groups] == [muon.keys(), adamw.keys(), adamw.keys()]
    assert optimizer.param_groups[0]["momentum"] == muon["momentum"]
    assert [group["optimizer_class"] for group in optimizer.param_groups] == [MUON, ADAMW, ADAMW]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    train(model, optimizer, range(1))
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.005, 0.0025]
    assert "Muon and AdamW" in repr(optimizer) or "AdamW and Muon" in repr(optimizer)
    optimizer.close()


def test_the_main_class_holds_for_groups_that_name_none() -> None:
    """With its arguments; a further group may bring a further class."""
    model = model_of()
    matrices, rest = shared(model)
    sgd: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
    optimizer = ZeroOptimizer([{"params": rest}], torch.optim.SGD, module=model, process_group=solo(), **sgd)
    optimizer.add_param_group({"params": matrices, "optimizer_class": Shampoo, "partition": "parameter"})
    assert "optimizer_class" not in optimizer.param_groups[0]
    assert optimizer.param_groups[0]["momentum"] == 0.9
    assert optimizer.param_groups[1]["lr"] == Shampoo([torch.zeros(1)]).defaults["lr"]
    assert "nesterov" not in optimizer.param_groups[1]
    train(model, optimizer, range(2))
    plain = model_of()
    matrices, rest = shared(plain)
    stepped = Several(torch.optim.SGD(rest, lr=0.1, momentum=0.9), Shampoo(matrices))
    train_plainly(plain, stepped, range(2))
    optimizer.close()
    assert_same_model(model, plain)


@pytest.mark.filterwarnings("ignore:Muon is not element-wise")
@pytest.mark.parametrize("stage", STAGES)
def test_in_mixed_precision_each_class_steps_its_master_weights(stage: int) -> None:
    def run(model: nn.Module, transport: Transport) -> list[Tensor]:
        optimizer = build(model, transport, stage, mixed_precision=MixedPrecision(torch.bfloat16))
        train(model, optimizer, range(2))
        found = [optimizer.full_master(p) for group in optimizer.param_groups for p in group["params"]]
        optimizer.close()
        return found

    one, *others = [ranks[0] for ranks in (on_ranks(1, run), on_ranks(2, run), on_ranks(3, run))]
    for other in others:
        for a, b in zip(one, other, strict=True):
            assert_same_bits(a, b)


@pytest.mark.filterwarnings("ignore:Muon is not element-wise")
def test_one_overflow_skips_the_step_of_every_class() -> None:
    def run(model: nn.Module, transport: Transport) -> nn.Module:
        optimizer, scaler = build(model, transport, 3), torch.amp.GradScaler("cpu", init_scale=2.0**10)
        scaler.scale(
            model(batch(0, transport.rank, model)).square().mean() * (torch.inf if transport.rank else 1)
        ).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**9
        optimizer.close()
        return model

    for model in on_ranks(2, run):
        assert_same_model(model, model_of())


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "error", "said"),
    [
        ("muon", TypeError, "param group 1: optimizer_class must be a class of optimizers, not 'muon'"),
        (nn.Linear, TypeError, "param group 1: optimizer_class must be a class of optimizers"),
        (torch.optim.Optimizer, TypeError, "param group 1: optimizer_class is Optimizer, which is abstract"),
        (torch.optim.LBFGS, ValueError, "LBFGS cannot be sharded: .*closure"),
    ],
)
def test_what_is_no_class_that_can_be_used_is_named(named: Any, error: type[Exception], said: str) -> None:
    matrices, rest = shared(model_of())
    groups = [{"params": rest}, {"params": matrices, "optimizer_class": named}]
    with pytest.raises(error, match=said):
        ZeroOptimizer(groups, process_group=solo())


def test_so_are_an_option_that_the_class_lacks_and_a_parameter_that_is_listed_twice() -> None:
    matrices, rest = shared(model_of())
    muon = {"params": matrices, "optimizer_class": torch.optim.Muon}
    with pytest.raises(ValueError, match="param group 1: Muon has no option 'fused': leave it out"):
        ZeroOptimizer([{"params": rest}, {**muon, "fused": True}], process_group=solo())
    with pytest.raises(ValueError, match=r"'blocks.0.0.weight' is listed twice"):
        ZeroOptimizer([{"params": rest + matrices[:1]}, muon], process_group=solo())
    with pytest.raises(ValueError, match=r"Muon refuses 'first.bias', of shape"):
        ZeroOptimizer([{**muon, "params": matrices + rest[1:2]}], process_group=solo())


def test_two_classes_of_one_name_are_refused() -> None:
    def made(rate: float) -> type[torch.optim.Optimizer]:
        class Opt(torch.optim.SGD):
            factor = rate

        return Opt

    matrices, rest = shared(model_of())
    with pytest.raises(ValueError, match=r"two classes have the name .*made\.<locals>\.Opt.*rename one"):
        ZeroOptimizer(
            [{"params": rest}, {"params": matrices, "optimizer_class": made(1.0)}], made(2.0), process_group=solo()
        )


def test_the_class_of_a_live_group_cannot_be_edited() -> None:
    model = model_of()
    matrices, rest = shared(model)
    groups = [{"params": rest}, {"params": matrices, "optimizer_class": torch.optim.Adam}]
    optimizer = ZeroOptimizer(groups, module=model, process_group=solo())
    for group, name in ((1, None), (0, optimizer.param_groups[1]["optimizer_class"]), (1, "SGD")):
        kept = dict(optimizer.param_groups[group])
        optimizer.param_groups[group]["optimizer_class"] = name
        if name is None:
            del optimizer.param_groups[group]["optimizer_class"]
        model(batch(0, 0, model)).sum().backward()
        with pytest.raises(RuntimeError, match=f"param group {group} is stepped by torch.optim.adam"):
            optimizer.step()
        optimizer.param_groups[group].clear()
        optimizer.param_groups[group].update(kept)
        optimizer.zero_grad()
    train(model, optimizer, range(1))
    optimizer.close()


def test_a_group_that_cannot_be_added_leaves_nothing_and_every_rank_learns_why() -> None:
    def run(model: nn.Module, transport: Transport) -> str:
        matrices, rest = shared(model)
        optimizer = ZeroOptimizer([{"params": rest}], module=model, process_group=transport)
        named: Any = torch.optim.Optimizer if transport.rank == 0 else Shampoo
        with pytest.raises((TypeError, ValueError)) as error:
            optimizer.add_param_group({"params": matrices, "optimizer_class": named, "partition": "parameter"})
        assert len(optimizer.param_groups) == 1
        optimizer.add_param_group({"params": matrices, "optimizer_class": torch.optim.Adam})
        train(model, optimizer, range(1))
        optimizer.close()
        return str(error.value)

    for said in on_ranks(2, run):
        assert "param group 1: optimizer_class is Optimizer, which is abstract" in said


@pytest.mark.filterwarnings("ignore:Muon is not element-wise")
def test_a_dict_of_other_classes_changes_nothing() -> None:
    model = model_of()
    optimizer = build(model, solo(), 2)
    train(model, optimizer, range(1))
    saved = optimizer.state_dict()
    wrong: list[tuple[Any, str]] = [
        (saved[ADAMW], f"one dict for each class, by its name: {MUON}, {ADAMW}; it has 'state', 'param_groups'"),
        ({MUON: saved[MUON]}, "one dict for each class"),
        ({MUON: saved[MUON], ADAMW: {**saved[ADAMW], "param_groups": []}}, f"has 0 param groups of {ADAMW}"),
        ({MUON: saved[ADAMW], ADAMW: saved[MUON]}, f"has 2 param groups of {MUON}, this optimizer 1"),
    ]
    for given, said in wrong:
        with pytest.raises(ValueError, match=said):
            optimizer.load_state_dict(given)
    optimizer.load_state_dict(saved)
    optimizer.close()


# -- arguments of the constructor alone --------------------------------------------------------------------------------


class Scaled(torch.optim.SGD):
    """Its updates are scaled by what its constructor was given, which no param group holds."""

    def __init__(self, params: Any, lr: float = 0.05, scale: float = 1.0, **kwargs: Any) -> None:
        super().__init__(params, lr, **kwargs)
        self.scale = scale

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(self.scale * group["lr"] * parameter.grad)


class Forwarding(Scaled):
    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)


class Popping(Scaled):
    def __init__(self, params: Any, lr: float, **kwargs: Any) -> None:
        super().__init__(params, lr, scale=kwargs.pop("factor", 1.0))


NAMED: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.5}),
    (Scaled, {"scale": 0.5}),
    (Forwarding, {"scale": 0.5}),
    (Popping, {"lr": 0.1, "factor": 0.5}),
]


@pytest.mark.parametrize(("cls", "given"), NAMED, ids=[cls.__name__ for cls, _ in NAMED])
@pytest.mark.parametrize("stage", STAGES)
def test_what_a_group_gives_its_class_reaches_the_constructor(
    cls: type[torch.optim.Optimizer], given: dict[str, Any], stage: int, tmp_path: Path
) -> None:
    """Its param groups and its dict are those of the class that is built with these arguments."""
    plain = model_of()
    matrices, rest = shared(plain)
    made: Any = cls
    sgd, stepped = torch.optim.SGD(rest), made(matrices, **given)
    train_plainly(plain, Several(sgd, stepped), range(3))
    names = [f"{each.__module__}.{each.__qualname__}" for each in (torch.optim.SGD, cls)]

    def run(model: nn.Module, transport: Transport) -> Any:
        matrices, rest = shared(model)
        groups = [{"params": rest}, {"params": matrices, "optimizer_class": cls, "layer": "block", **given}]
        optimizer = ZeroOptimizer(groups, torch.optim.SGD, module=model, stage=stage, process_group=transport)
        train(model, optimizer, range(2))
        zero.save(tmp_path / "saved", optimizer)
        zero.load(tmp_path / "saved", optimizer, rng=False)
        train(model, optimizer, range(2, 3))
        optimizer.consolidate_state_dict(None)
        states = optimizer.state_dict()[names[1]]
        del optimizer.param_groups[1]["layer"]
        optimizer.load_state_dict(dict(zip(names, (sgd.state_dict(), stepped.state_dict()), strict=True)))
        optimizer.close()
        return model, states

    for model, states in on_ranks(2, run):
        assert_same_model(model, plain)
        assert_same_states(states, stepped.state_dict())
        (group,) = states["param_groups"]
        assert group.keys() == {*stepped.state_dict()["param_groups"][0], "optimizer_class", "param_names", "layer"}


@pytest.mark.parametrize("main", [torch.optim.AdamW, Scaled])
def test_two_values_of_an_argument_that_the_constructor_uses_are_an_error(main: type[torch.optim.Optimizer]) -> None:
    model = model_of()
    matrices, rest = shared(model)
    first = {"params": matrices[:2], "optimizer_class": Scaled, "scale": 0.5, "lr": 0.1}
    groups: list[dict[str, Any]] = [{"params": rest}, first] if main is not Scaled else [{"params": rest}]
    arguments = {"scale": 0.5} if main is Scaled else {}
    optimizer = ZeroOptimizer(groups, main, module=model, process_group=solo(), **arguments)
    count = len(optimizer.param_groups)
    for other in ({"scale": 2.0}, {}):
        with pytest.raises(ValueError, match=f"param group {count}: scale of Scaled is another one than for the other"):
            optimizer.add_param_group({"params": matrices[2:], "optimizer_class": Scaled, **other})
    optimizer.add_param_group({"params": matrices[2:], "optimizer_class": Scaled, "scale": 0.5, "lr": 0.2})
    assert optimizer.param_groups[count]["lr"] == 0.2
    assert optimizer.param_groups[count]["weight_decay"] == 0
    train(model, optimizer, range(1))
    optimizer.close()


def test_a_group_without_an_argument_that_its_class_needs_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"param group 0: Popping cannot be built with its options .*'lr'"):
        ZeroOptimizer([{"params": shared(model_of())[0], "optimizer_class": Popping}], process_group=solo())


def test_a_group_of_a_named_class_has_the_defaults_of_the_class_whatever_other_groups_give() -> None:
    matrices, rest = shared(model_of())
    groups = [
        {"params": rest, "optimizer_class": torch.optim.Adam, "weight_decay": 0.1, "lr": 0.5},
        {"params": matrices, "optimizer_class": torch.optim.Adam, "betas": (0.5, 0.5)},
    ]
    optimizer = ZeroOptimizer(groups, process_group=solo())
    assert [(g["lr"], g["weight_decay"], g["betas"]) for g in optimizer.param_groups] == [
        (0.5, 0.1, (0.9, 0.999)),
        (0.001, 0, (0.5, 0.5)),
    ]
    optimizer.close()
