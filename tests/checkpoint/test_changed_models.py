"""A checkpoint is restored into a model with other names, other rows and other parts, at any topology."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads
from zero import MixedPrecision, ShardedAverage, ZeroOptimizer, load, save

from ..support.errors import error_of
from ..support.loops import code_of
from ..support.models import seeded
from ..support.plain import assert_same_bits, assert_same_model, assert_same_value
from ..support.pool import GlooPool

WIDTH, OLD, NEW = 5, 7, 10
BF16 = MixedPrecision(torch.bfloat16)
RENAMED = {"inner.weight": "body.weight", "inner.bias": "body.bias", "left_out": None}
GROWN = ("words.weight", "head.weight", "head.bias")


class Old(nn.Module):
    """What is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(OLD, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, OLD)
        self.left_out = nn.Parameter(torch.randn(3))
        self.other_shape = nn.Parameter(torch.randn(WIDTH))
        self.counts = nn.Buffer(torch.arange(4.0))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.inner(self.words(tokens)) * self.other_shape[0] + self.left_out.sum()
        found: Tensor = self.head(x).square().mean() + self.other_shape.square().sum()
        return found


class New(nn.Module):
    """What receives it: with a larger vocabulary, another name, another shape, and a new layer."""

    def __init__(self) -> None:
        super().__init__()
        self.added = nn.Linear(WIDTH, WIDTH)
        self.words = nn.Embedding(NEW, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, NEW)
        self.other_shape = nn.Parameter(torch.randn(WIDTH, 2))
        self.counts = nn.Buffer(torch.zeros(4))
        self.new_counts = nn.Buffer(torch.ones(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.added(self.body(self.words(tokens))) * self.other_shape[0, 0]
        found: Tensor = self.head(x).square().mean() + self.other_shape.square().sum()
        return found


def train(model: nn.Module, optimizer: Any, ranks: range, world: int, steps: int, vocabulary: int) -> None:
    """Take steps of 12 micro-batches, of which these ranks run theirs."""
    for step in range(steps):
        for micro in range(12):
            if micro % world in ranks:
                generator = torch.Generator().manual_seed(100 * step + micro)
                model(torch.randint(vocabulary, (4,), generator=generator)).backward()
        if isinstance(optimizer, torch.optim.AdamW) and not isinstance(optimizer, ZeroOptimizer):
            for p in model.parameters():
                p.grad /= 12
        optimizer.step()
        optimizer.zero_grad()


def grown(old: Tensor, new: Tensor, rest: Tensor) -> Tensor:
    """Return ``new`` with the rows of ``old``, and ``rest`` in its own rows."""
    found = new.clone()
    found[: len(old)] = old
    found[len(old) :] = rest
    return found


def plain_of_both(steps: int) -> tuple[New, torch.optim.AdamW]:
    """Train the old model in a plain loop, and put by hand what it has into the new one and a new optimizer."""
    old, new = seeded(0, Old), seeded(1, New)
    before = torch.optim.AdamW(old.parameters(), lr=1e-2)
    train(old, before, range(1), 1, 2, OLD)
    after = torch.optim.AdamW(new.parameters(), lr=1e-2)
    theirs = dict(old.named_parameters())
    for name, parameter in new.named_parameters():
        source = theirs.get(name.replace("body", "inner"))
        if source is None or name == "other_shape":
            continue
        state = before.state[source]
        with torch.no_grad():
            if name in GROWN:
                zeros = torch.zeros_like(parameter)
                after.state[parameter] = {
                    key: value if not value.dim() else grown(value, zeros, zeros[OLD:]) for key, value in state.items()
                }
                parameter.copy_(grown(source, parameter, parameter[OLD:]))
            else:
                after.state[parameter] = state
                parameter.copy_(source)
    new.counts.copy_(old.counts)
    train(new, after, range(1), 1, steps, NEW)
    return new, after


def of(
    group: Any, make: Callable[[], nn.Module], stage: int, seed: int, precision: Any = None
) -> tuple[Any, ZeroOptimizer]:
    model = seeded(seed, make)
    optimizer = ZeroOptimizer(
        model,
        torch.optim.AdamW,
        stage=stage,
        process_group=group,
        bucket_cap_mb=0.0001,
        divisor=12,
        mixed_precision=precision,
        units=(lambda module: isinstance(module, (nn.Linear, nn.Embedding))) if stage == 3 else None,
        lr=1e-2,
    )
    return model, optimizer


def saved(folder: Path, stage: int = 2, world: int = 2, precision: Any = None) -> Path:
    def program(transport: Transport) -> None:
        model, optimizer = of(transport, Old, stage, 0, precision)
        train(model, optimizer, range(transport.rank, transport.rank + 1), world, 2, OLD)
        save(folder, optimizer)

    on_threads(world, program)
    return folder


def is_grown(name: str, before: tuple[int, ...], now: tuple[int, ...]) -> bool:
    assert before != now
    return name in GROWN


LOADED = {"strict": False, "rename": RENAMED, "resize": is_grown, "rng": False}


def goes_on(group: Any, rank: int, world: int, stage: int, folder: Path) -> tuple[list[Tensor], Any]:
    """Restore into the new model and take two steps. Return its tensors, and on rank 0 the states."""
    model, optimizer = of(group, New, stage, 1)
    found = load(folder, optimizer, **LOADED)
    assert sorted(found.missing_keys) == ["added.bias", "added.weight", "new_counts"]
    assert found.unexpected_keys == ("left_out",)
    assert found.mismatched_keys == ("other_shape",)
    assert sorted(found.resized_keys) == sorted(GROWN)
    train(model, optimizer, range(rank, rank + 1), world, 2, NEW)
    optimizer.consolidate_state_dict()
    states = optimizer.state_dict()["state"] if rank == 0 else None
    optimizer.close()
    return [tensor.detach() for tensor in model.state_dict().values()], states


def assert_plain(results: Sequence[tuple[list[Tensor], Any]]) -> None:
    plain, theirs = plain_of_both(2)
    assert_same_value(results[0][1], theirs.state_dict()["state"], "states")
    for tensors, _ in results:
        for mine, (name, other) in zip(tensors, plain.state_dict().items(), strict=True):
            assert_same_bits(mine, other, name)


@pytest.mark.first(2)
@pytest.mark.parametrize(("stage", "world"), [(3, 3), (2, 4), (0, 2), (1, 3), (2, 1), (3, 1), (3, 6)])
def test_training_goes_on_as_in_the_plain_loop_of_the_changed_model(stage: int, world: int, tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved")
    assert_plain(on_threads(world, lambda t: goes_on(t, t.rank, world, stage, folder)))


def test_so_it_does_on_processes(gloo: GlooPool, tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved")
    assert_plain(gloo.run(goes_on, 3, 3, folder, ranks=(0, 1, 2)))


def test_the_recipe_does_the_same(tmp_path: Path) -> None:
    saved(tmp_path / "saved")

    def program(transport: Transport) -> dict[str, Tensor]:
        model, optimizer = of(transport, New, 2, 1)
        exec(code_of("Into a changed model"), {"checkpoint": tmp_path / "saved", "optimizer": optimizer})
        other, again = of(transport, New, 2, 1)
        load(tmp_path / "saved", again, **LOADED)
        assert_same_model(model, other)
        return dict(model.named_parameters())

    found = on_threads(2, program)[0]
    assert not torch.equal(found["words.weight"], seeded(1, New).words.weight)


@pytest.mark.first(2)
@pytest.mark.parametrize("precision", [None, BF16], ids=["", "bf16"])
@pytest.mark.parametrize("before", [None, BF16], ids=["from fp32", "from bf16"])
def test_master_weights_and_averages_have_old_rows_as_they_were_saved_and_new_ones_of_the_model(
    before: Any, precision: Any, tmp_path: Path
) -> None:
    saved(tmp_path / "saved", 3, 2, before)
    kept: dict[str, Tensor] = {}

    def alone(transport: Transport) -> None:
        model, optimizer = of(transport, Old, 0, 0, before)
        load(tmp_path / "saved", optimizer, rng=False)
        kept.update({name: optimizer.full_master(p) for name, p in model.named_parameters()})

    on_threads(1, alone)

    def program(transport: Transport) -> list[dict[str, Tensor]]:
        model, optimizer = of(transport, New, transport.world_size, 1, precision)
        train(model, optimizer, range(transport.rank, transport.rank + 1), transport.world_size, 1, NEW)
        fresh = {name: optimizer.full_master(p) for name, p in model.named_parameters()}
        load(tmp_path / "saved", optimizer, **LOADED)
        optimizer.consolidate_state_dict(None)
        states = optimizer.state_dict()["state"]
        for number, (name, parameter) in enumerate(model.named_parameters()):
            assert (number in states) == (name in GROWN or name.startswith("body")), name
            if name in GROWN:
                assert states[number]["exp_avg"].shape == parameter.shape
                assert not states[number]["exp_avg"][OLD:].count_nonzero(), "new rows begin with 0"
        return [fresh, {name: optimizer.full_master(p) for name, p in model.named_parameters()}]

    for world in (1, 2, 3):
        for fresh, found in on_threads(world, program):
            for name, weights in found.items():
                source = kept.get(name.replace("body", "inner"), fresh[name])
                if name == "other_shape":
                    source = fresh[name]
                expected = grown(source, fresh[name], fresh[name][OLD:]) if name in GROWN else source
                assert_same_bits(weights, expected, name)


@pytest.mark.parametrize("stage", [0, 1])
def test_weights_without_master_weights_replace_those_of_every_rank(stage: int, tmp_path: Path) -> None:
    """The saved weights are those of the model, rounded: only the master weights differ."""

    def trained(transport: Transport) -> tuple[Any, ZeroOptimizer]:
        model, optimizer = of(transport, New, stage, 1, BF16)
        train(model, optimizer, range(transport.rank, transport.rank + 1), transport.world_size, 2, NEW)
        return model, optimizer

    def write(transport: Transport) -> None:
        model = nn.Module()
        for name, value in trained(transport)[0].state_dict().items():
            if name in GROWN:
                model.register_parameter(name.replace(".", "_"), nn.Parameter(value[:OLD].to(torch.bfloat16)))
        save(tmp_path / "saved", ZeroOptimizer(model, torch.optim.AdamW, process_group=transport))

    def program(transport: Transport) -> nn.Module:
        model, optimizer = trained(transport)
        names = {name.replace(".", "_"): name for name in GROWN}
        load(tmp_path / "saved", optimizer, strict=False, rename=names, resize=is_grown, rng=False)
        train(model, optimizer, range(transport.rank, transport.rank + 1), transport.world_size, 2, NEW)
        optimizer.close()
        return model

    on_threads(1, write)
    (alone,) = on_threads(1, program)
    for found in on_threads(3, program):
        assert_same_model(found, alone)


def test_a_smaller_vocabulary_has_the_first_rows(tmp_path: Path) -> None:
    def larger(transport: Transport) -> tuple[nn.Module, ZeroOptimizer]:
        return of(transport, lambda: nn.Sequential(nn.Embedding(NEW, WIDTH)), 3, 0)

    def smaller(transport: Transport) -> Tensor:
        model, optimizer = of(transport, lambda: nn.Sequential(nn.Embedding(OLD, WIDTH)), 1, 1)
        found = load(tmp_path / "saved", optimizer, resize=lambda *_: True, rng=False)
        assert found.resized_keys == ("0.weight",)
        optimizer.close()
        weight: Tensor = model[0].weight
        return weight

    def write(transport: Transport) -> Tensor:
        model, optimizer = larger(transport)
        model(torch.arange(NEW)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        save(tmp_path / "saved", optimizer)
        optimizer.close()
        weight: Tensor = model.get_parameter("0.weight")
        return weight

    (whole,) = on_threads(1, write)
    for found in on_threads(2, smaller):
        assert_same_bits(found, whole[:OLD])


def test_param_groups_that_are_others_keep_their_options_and_a_class_has_its_own_states(tmp_path: Path) -> None:
    saved(tmp_path / "saved")

    def program(transport: Transport) -> None:
        model = seeded(1, New)
        groups = [
            {"params": list(model.words.parameters()), "lr": 0.5},
            {"params": list(model.body.parameters()), "optimizer_class": torch.optim.SGD, "lr": 0.25},
        ]
        optimizer = ZeroOptimizer(groups, torch.optim.AdamW, module=model, process_group=transport)
        found = load(tmp_path / "saved", optimizer, **LOADED)
        assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
        assert "the options of param group 0 (the checkpoint's groups are not those of this optimizer)" in (
            found.not_restored
        )
        anew = "its states are those of torch.optim.adamw.AdamW: they begin anew"
        assert f"the states of 'body.weight' ({anew})" in found.not_restored
        optimizer.consolidate_state_dict(None)
        states = optimizer.state_dict()
        assert list(states["torch.optim.adamw.AdamW"]["state"]) == [0]
        assert not states["torch.optim.sgd.SGD"]["state"]

    on_threads(2, program)


def test_param_groups_in_another_order_keep_their_options(tmp_path: Path) -> None:
    def made(transport: Transport, names: tuple[str, str], rates: tuple[float, float]) -> ZeroOptimizer:
        model = seeded(0, New)
        parts = [model.get_submodule(name).parameters() for name in names]
        groups = [{"params": list(part), "lr": rate} for part, rate in zip(parts, rates, strict=True)]
        return ZeroOptimizer(groups, torch.optim.AdamW, module=model, process_group=transport)

    def program(transport: Transport) -> list[float]:
        save(tmp_path / "saved", made(transport, ("words", "body"), (0.5, 0.25)))
        optimizer = made(transport, ("body", "words"), (0.125, 0.0625))
        assert len(load(tmp_path / "saved", optimizer, strict=False).not_restored) == 2
        return [group["lr"] for group in optimizer.param_groups]

    assert on_threads(2, program) == [[0.125, 0.0625]] * 2


def test_the_average_of_a_parameter_that_was_frozen_begins_with_its_weights(tmp_path: Path) -> None:
    def made(transport: Transport, seed: int, *, frozen: bool) -> tuple[Any, ZeroOptimizer, ShardedAverage]:
        model = seeded(seed, New)
        model.body.requires_grad_(not frozen)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = ZeroOptimizer(trained, torch.optim.AdamW, stage=2, module=model, process_group=transport)
        return model, optimizer, ShardedAverage(optimizer)

    def write(transport: Transport) -> dict[str, Tensor]:
        model, optimizer, average = made(transport, 0, frozen=True)
        average.update_parameters()
        train(model, optimizer, range(transport.rank, transport.rank + 1), 2, 1, NEW)
        average.update_parameters()
        save(tmp_path / "saved", optimizer)
        found = average.gather(None)
        assert found is not None
        return {**{name: value.detach() for name, value in model.named_parameters()}, **found}

    def read(transport: Transport) -> tuple[dict[str, Tensor] | None, int, str, tuple[str, ...]]:
        _, optimizer, average = made(transport, 1, frozen=False)
        text = error_of(lambda: load(tmp_path / "saved", optimizer, rng=False))
        restored = load(tmp_path / "saved", optimizer, strict=False, rng=False)
        return average.gather(None), average.n_averaged, text, restored.not_restored

    expected = on_threads(2, write)[0]
    for found, count, text, not_restored in on_threads(3, read):
        assert found is not None
        assert_same_value(found, {name: expected[name] for name in found}, "averages")
        assert count == 2
        assert "have no 'body.weight' of this model's shape: give the ShardedAverage another name=" in text
        words = "the average 'average' of 'body.weight' (the checkpoint has none: it begins with the weights)"
        assert words in not_restored


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a name that was not saved": ({"rename": {"innr.weight": "body.weight"}}, "rename: the checkpoint has no 'innr.we"),
    "two names become one": (
        {"rename": lambda name: name.replace("bias", "weight")},
        "rename: 'inner.weight' and 'inner.bias' of the checkpoint would both become 'inner.weight'",
    ),
    "no name": ({"rename": lambda name: 3}, "is 3, neither a text nor None"),
    "no map": ({"rename": ["inner.weight"]}, "rename must be a mapping from saved names to new ones, or a function"),
    "no function": ({"resize": True}, "resize must be a function of a name and two shapes, not True"),
    "a function that fails": (
        {"rename": lambda name: {}[name]},
        "rename: the function failed for 'left_out' (KeyError: 'left_out')",
    ),
    "a function that finds no file": (
        {"rename": lambda name: Path("no such map").read_text()},
        "rename: the function failed for 'left_out' (FileNotFoundError: ",
    ),
    "a function of two": (
        {"resize": lambda name, shape: True},
        "resize: the function failed for 'other_shape', of shape (5,) in the checkpoint and (5, 2) in the model (TypeE",
    ),
    "columns": ({"resize": lambda *_: True}, "which differ in more than their first dimension: return False for it"),
    "no bool": ({"strict": "no"}, "strict must be True or False, not 'no'"),
    "strict": (
        {"strict": True},
        "in the model: it is that of another model. To load what both have, pass strict=False",
    ),
    "a function that fails on one rank": (
        {"resize": lambda *_: {}[0]},
        "resize: the function failed for 'other_shape', of shape (5,) in the checkpoint and (5, 2) in the model (KeyEr",
    ),
    "one rank": ({"rename": None}, "rank 1 passes other strict=, rename= or resize= than rank 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_an_error_on_every_rank_and_nothing_changes(case: str, tmp_path: Path) -> None:
    saved(tmp_path / "saved")
    arguments, words = BAD[case]

    def program(transport: Transport) -> str:
        model, optimizer = of(transport, New, 2, 1)
        before, given = copy.deepcopy(model.state_dict()), {**LOADED, "resize": None, **arguments}
        if case == "one rank" and transport.rank == 0:
            given["rename"] = RENAMED
        if case == "a function that fails on one rank" and transport.rank == 0:
            given["resize"] = is_grown
        text = error_of(lambda: load(tmp_path / "saved", optimizer, **given))
        for name, value in model.state_dict().items():
            assert_same_bits(value, before[name], name)
        return text

    for text in on_threads(2, program):
        assert words in text
