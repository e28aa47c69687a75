"""A checkpoint is restored into a model with other names, rows, parts and ties; what it lacks begins anew."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads, solo
from zero import MixedPrecision, ShardedAverage, ZeroOptimizer, load, open_checkpoint, save
from zero.checkpoint.read.reader import Checkpoint
from zero.runtime.flat_states import RoundedShard

from ..support.errors import assert_in_order, error_of
from ..support.loops import code_of
from ..support.models import seeded
from ..support.parts import parts_of
from ..support.plain import assert_same_bits, assert_same_model, assert_same_value
from ..support.two_modes import ScheduleFree

pytestmark = pytest.mark.filterwarnings("ignore:not restored from")
WORDS, MORE, WIDTH, STEPS = 7, 9, 5, 2
BF16 = MixedPrecision(torch.bfloat16)
RENAMED = {"inner.weight": "body.weight", "inner.bias": "body.bias", "left_out": None}
GROWN = ("head.weight", "words.weight")
ANEW = "the states of {!r} ({}: they begin anew)"


class Net(nn.Module):
    """A small language model.

    ``later``: with another name, another shape, a new layer and a new buffer. ``tied``: its head is its embedding,
    registered behind it or (``head_first``) before it.
    """

    def __init__(self, words: int = WORDS, *, later: bool = False, tied: bool = False, head_first: bool = False):
        super().__init__()
        if head_first:
            self.head = nn.Linear(WIDTH, words, bias=False)
        self.words = nn.Embedding(words, WIDTH)
        self.add_module("body" if later else "inner", nn.Linear(WIDTH, WIDTH))
        self.other = nn.Parameter(torch.randn((WIDTH, 2) if later else (WIDTH,)))
        self.counts = nn.Buffer(torch.arange(4.0) * (not later))
        if later:
            self.added = nn.Linear(WIDTH, WIDTH)
            self.new_counts = nn.Buffer(torch.ones(2))
        else:
            self.left_out = nn.Parameter(torch.randn(3))
        if not head_first:
            self.head = nn.Linear(WIDTH, words, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        x = self.added(self.body(x)) if hasattr(self, "added") else self.inner(x) + self.left_out.sum()
        found: Tensor = self.head(x * self.other.flatten()[0]).square().mean() + self.other.square().sum()
        return found


def later() -> Net:
    return Net(MORE, later=True)


def is_grown(name: str, before: tuple[int, ...], now: tuple[int, ...]) -> bool:
    assert before != now
    return name in GROWN


LOADED: dict[str, Any] = {"strict": False, "rename": RENAMED, "resize": is_grown, "rng": False}


def train(model: nn.Module, optimizer: Any, transport: Transport | None, steps: range) -> None:
    for step in steps:
        for micro in range(6):
            if transport is None or micro % transport.world_size == transport.rank:
                generator = torch.Generator().manual_seed(100 * step + micro)
                model(torch.randint(WORDS, (4,), generator=generator)).backward()
        for p in model.parameters() if transport is None else ():
            assert p.grad is not None
            p.grad /= 6
        optimizer.step()
        optimizer.zero_grad()


def made(
    transport: Transport, build: Callable[[], Net], seed: int, stage: int = 2, cls: Any = torch.optim.AdamW, **more: Any
) -> tuple[Net, ZeroOptimizer]:
    model = seeded(seed, build)
    given = {"stage": stage, "process_group": transport, "bucket_cap_mb": 0.0001, "divisor": 6}
    optimizer = ZeroOptimizer(model, cls, **given, **more)
    if hasattr(optimizer, "train"):
        optimizer.train()
    return model, optimizer


def weights_of(optimizer: ZeroOptimizer) -> dict[str, Tensor]:
    found = optimizer.full_state_dict(None)
    assert found is not None
    return copy.deepcopy(found)


def states_of(optimizer: ZeroOptimizer) -> dict[str, dict[str, Any]]:
    optimizer.consolidate_state_dict(None)
    found = copy.deepcopy(optimizer.state_dict())
    names = [name for group in found["param_groups"] for name in group["param_names"]]
    return {name: found["state"][index] for index, name in enumerate(names) if index in found["state"]}


def saved(folder: Path, build: Callable[[], Net] = Net, **more: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    def program(transport: Transport) -> tuple[dict[str, Tensor], dict[str, Any]]:
        model, optimizer = made(transport, build, 0, **more)
        train(model, optimizer, transport, range(STEPS))
        save(folder, optimizer)
        return weights_of(optimizer), states_of(optimizer)

    return on_threads(2, program)[0]


def with_rows(value: Tensor, rest: Tensor) -> Tensor:
    return torch.cat((value, rest[len(value) :])) if value.dim() else value.clone()


NOT_AT_ZERO = "its state {!r} does not begin at 0, which new rows would have"
CLASSES: dict[str, tuple[int, Any, dict[str, Any], str | None]] = {
    "Adam with decay": (3, torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}, None),
    "Adagrad": (2, torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5}, NOT_AT_ZERO.format("sum")),
    "Adafactor": (2, torch.optim.Adafactor, {"partition": "parameter"}, "its states do not have its rows"),
    "schedule-free": (3, ScheduleFree, {}, NOT_AT_ZERO.format("z")),
}


@pytest.mark.first(1)
@pytest.mark.parametrize("name", CLASSES)
def test_training_goes_on_in_a_changed_model_as_in_the_plain_loop_of_it(name: str, tmp_path: Path) -> None:
    """The states of a new layer begin as the class begins them; so do those of a grown parameter, if 0 in new rows
    would not be such a beginning."""
    stage, cls, options, why = CLASSES[name]
    before, states = saved(tmp_path / "saved", cls=cls, **options)

    def program(transport: Transport) -> tuple[Any, Any, Any]:
        model, optimizer = made(transport, later, 1, stage, cls, **options)
        restored = load(tmp_path / "saved", optimizer, **LOADED)
        assert sorted(restored.missing_keys) == ["added.bias", "added.weight", "new_counts"]
        assert (restored.unexpected_keys, restored.mismatched_keys) == (("left_out",), ("other",))
        assert sorted(restored.resized_keys) == list(GROWN)
        expected = [] if why is None else [ANEW.format(part, why) for part in GROWN]
        assert sorted(line for line in restored.not_restored if "rows" in line or "begin at 0" in line) == expected
        group = {key: copy.deepcopy(value) for key, value in optimizer.param_groups[0].items() if key != "params"}
        train(model, optimizer, transport, range(STEPS, STEPS + 1))
        return group, weights_of(optimizer), states_of(optimizer)

    for group, trained, found in on_threads(3, program):
        plain = seeded(1, later)
        for part, value in plain.state_dict().items():
            old = part.replace("body", "inner")
            if part != "other" and old in before:
                value.copy_(with_rows(before[old], value))
        other = cls(plain.parameters(), **{key: value for key, value in options.items() if key != "partition"})
        other.param_groups[0].update({key: value for key, value in group.items() if key in other.param_groups[0]})
        for part, p in plain.named_parameters():
            if part.startswith("body") or (part in GROWN and why is None):
                zeros = torch.zeros_like(p)
                of_part = states[part.replace("body", "inner")].items()
                other.state[p] = {
                    key: with_rows(value, zeros) if part in GROWN else copy.deepcopy(value) for key, value in of_part
                }
        train(plain, other, None, range(STEPS, STEPS + 1))
        assert_same_value(trained, plain.state_dict(), "weights")
        for part, p in plain.named_parameters():
            assert_same_value(found[part], dict(other.state[p]), part)


def test_the_recipe_does_the_same_and_fewer_rows_are_the_first_ones(tmp_path: Path) -> None:
    saved(tmp_path / "saved")

    def program(transport: Transport) -> None:
        model, optimizer = made(transport, later, 1)
        exec(code_of("Into a changed model"), {"checkpoint": tmp_path / "saved", "optimizer": optimizer})
        other, again = made(transport, later, 1)
        load(tmp_path / "saved", again, **LOADED)
        assert_same_model(model, other)
        assert not torch.equal(model.words.weight, seeded(1, later).words.weight)
        save(tmp_path / "again", again)
        smaller, fewer = made(transport, lambda: Net(WORDS - 2, later=True), 2)
        load(tmp_path / "again", fewer, resize=lambda *_: True, rng=False)
        assert_same_bits(smaller.words.weight, other.words.weight[: WORDS - 2])

    on_threads(2, program)


@pytest.mark.first(1)
@pytest.mark.parametrize("precision", [BF16, None], ids=["bf16", ""])
@pytest.mark.parametrize("before", ["fp32", "bf16", "all in bf16"])
def test_master_weights_have_old_rows_as_they_were_saved_and_new_ones_of_the_model(
    before: str, precision: Any, tmp_path: Path
) -> None:
    """``all in bf16``: without master weights, from which those of every rank are replaced."""
    build = (lambda: Net().bfloat16()) if before == "all in bf16" else Net
    mixed = {"mixed_precision": BF16} if before == "bf16" else {}
    saved(tmp_path / "saved", build, lr=0.01, stage=3, **mixed)

    opened = open_checkpoint(tmp_path / "saved")
    kept = {name: value.float() for name, value in {**opened.model_state_dict(), **opened.masters()}.items()}

    def program(transport: Transport) -> None:
        model, optimizer = made(transport, later, 1, 3 - transport.world_size, lr=0.01, mixed_precision=precision)
        train(model, optimizer, transport, range(1))
        named = dict(model.named_parameters())
        fresh = {name: optimizer.full_master(p).float() for name, p in named.items()}
        load(tmp_path / "saved", optimizer, **LOADED)
        for name, p in named.items():
            source = None if name == "other" else kept.get(name.replace("body", "inner"))
            expected = fresh[name] if source is None else with_rows(source, fresh[name])
            assert_same_bits(optimizer.full_master(p).float(), expected, name)
            assert_same_bits(p.detach(), expected.to(p.dtype), f"{name} on rank {transport.rank}")
        optimizer.consolidate_state_dict(None)
        states = optimizer.state_dict()["state"]
        for index, (name, p) in enumerate(named.items()):
            old = kept.get(name.replace("body", "inner"))
            for value in states[index].values() if index in states and old is not None else ():
                if value.shape == p.shape and p.shape != old.shape:
                    assert not value[len(old) :].count_nonzero(), "new rows begin at 0, whatever was there"

    for world in (1, 2, 3):
        on_threads(world, program)


@pytest.mark.first(1)
@pytest.mark.parametrize(("before", "after"), [(None, BF16), (BF16, None)], ids=["to bf16", "to fp32"])
def test_another_precision_goes_on_as_if_constructed_from_the_widest_weights(
    before: Any, after: Any, tmp_path: Path
) -> None:
    saved(tmp_path / "saved", lr=0.01, stage=3, mixed_precision=before)
    opened = open_checkpoint(tmp_path / "saved")
    widest = {**opened.model_state_dict(), **opened.masters()}
    states = opened.optimizer_state_dict()
    names = [name for group in states["param_groups"] for name in group["param_names"]]
    states["masters"] = {i: widest[name] for i, name in enumerate(names)} if after else {}

    def constructed() -> Net:
        model = Net()
        model.load_state_dict(widest)
        return model

    def program(transport: Transport, *, stage: int, anew: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
        model, optimizer = made(transport, constructed if anew else Net, 1, stage, lr=0.01, mixed_precision=after)
        if anew:
            optimizer.load_state_dict(copy.deepcopy(states))
        else:
            load(tmp_path / "saved", optimizer, rng=False)
        train(model, optimizer, transport, range(STEPS, 2 * STEPS))
        return weights_of(optimizer), states_of(optimizer)

    expected = on_threads(1, functools.partial(program, stage=0, anew=True))[0]
    for world, stage in ((1, 0), (3, 3)):
        for found in on_threads(world, functools.partial(program, stage=stage, anew=False)):
            assert_same_value(found, expected, f"{world} ranks, stage {stage}")


def test_master_weights_of_another_shape_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "saved", lr=0.01, mixed_precision=BF16)
    _, optimizer = made(solo(), Net, 1, mixed_precision=BF16)
    tensors = Checkpoint.tensors

    def with_a_row_more(checkpoint: Checkpoint, folder: str) -> Any:
        found = tensors(checkpoint, folder)
        if folder == "masters":
            path, entry = found["other"]
            found |= {"other": (path, dataclasses.replace(entry, shape=(WIDTH + 1,)))}
        return found

    monkeypatch.setattr(Checkpoint, "tensors", with_a_row_more)
    told = error_of(load, tmp_path / "saved", optimizer, rng=False)
    assert "the master weights of 'other' in the checkpoint belong to another model" in told


def test_param_groups_that_are_others_keep_their_options_and_a_class_has_its_own_states(tmp_path: Path) -> None:
    saved(tmp_path / "saved")

    def of(transport: Transport, *names: str, **of_second: Any) -> ZeroOptimizer:
        model = seeded(1, later)
        first, second = ({"params": list(model.get_submodule(name).parameters())} for name in names)
        groups = [{**first, "lr": 0.5}, {**second, "lr": 0.25, **of_second}]
        return ZeroOptimizer(groups, torch.optim.AdamW, module=model, process_group=transport)

    def program(transport: Transport) -> None:
        optimizer = of(transport, "words", "body", optimizer_class=torch.optim.SGD)
        found = load(tmp_path / "saved", optimizer, **LOADED).not_restored
        assert "the options of param group 0 (the checkpoint's groups are not those of this optimizer)" in found
        assert ANEW.format("body.weight", "its states are those of torch.optim.adamw.AdamW") in found
        optimizer.consolidate_state_dict(None)
        states = optimizer.state_dict()
        assert list(states["torch.optim.adamw.AdamW"]["state"]) == [0]
        assert not states["torch.optim.sgd.SGD"]["state"]
        save(tmp_path / "two", of(transport, "words", "body"))
        turned = of(transport, "body", "words")
        assert len(load(tmp_path / "two", turned, strict=False).not_restored) == 2
        for each in (optimizer, turned):
            assert [group["lr"] for group in each.param_groups] == [0.5, 0.25]

    on_threads(2, program)


def test_the_average_of_a_parameter_that_was_frozen_begins_with_its_weights(tmp_path: Path) -> None:
    def of(transport: Transport, seed: int) -> tuple[ZeroOptimizer, ShardedAverage]:
        model = seeded(seed, later)
        model.body.requires_grad_(bool(seed))
        optimizer = ZeroOptimizer(
            [p for p in model.parameters() if p.requires_grad], module=model, process_group=transport
        )
        return optimizer, ShardedAverage(optimizer)

    def write(transport: Transport) -> dict[str, Tensor]:
        optimizer, average = of(transport, 0)
        average.update_parameters()
        with optimizer.gathered(write=True), torch.no_grad():
            torch._foreach_mul_(optimizer.param_groups[0]["params"], 3)
        average.update_parameters()
        save(tmp_path / "saved", optimizer)
        return {**weights_of(optimizer), **(average.gather(None) or {})}

    def read(transport: Transport) -> dict[str, Tensor]:
        optimizer, average = of(transport, 1)
        text = error_of(load, tmp_path / "saved", optimizer, rng=False)
        assert "have no 'body.weight' of this model's shape: give the ShardedAverage another name=" in text
        restored = load(tmp_path / "saved", optimizer, strict=False, rng=False)
        words = "the average 'average' of 'body.weight' (the checkpoint has none: it begins with the weights)"
        assert words in restored.not_restored
        assert average.n_averaged == 2
        return average.gather(None) or {}

    expected = on_threads(2, write)[0]
    for found in on_threads(3, read):
        assert "body.weight" in found
        assert_same_value(found, {name: expected[name] for name in found}, "averages")


def test_a_parameter_that_was_never_trained_is_saved_alike_whenever_it_was_frozen(tmp_path: Path) -> None:
    def content(transport: Transport, moment: str) -> str:
        model = seeded(0, Net).bfloat16()
        model.inner.requires_grad_(moment == "later")
        optimizer = ZeroOptimizer(model, mixed_precision=BF16, process_group=transport)
        model.inner.requires_grad_(False)
        model(torch.arange(WORDS)).backward()
        optimizer.step()
        return save(tmp_path / f"{moment} {transport.world_size}", optimizer).result()

    moments = itertools.product(("before", "later"), (1, 2))
    found = [on_threads(n, functools.partial(content, moment=moment)) for moment, n in moments]
    assert len({each for ranks in found for each in ranks}) == 1


@pytest.mark.usefixtures("accelerated")
def test_a_save_keeps_no_copy_of_what_is_frozen_beside_its_master_weights(tmp_path: Path) -> None:
    def program(transport: Transport) -> None:
        model = seeded(0, Net)
        optimizer = ZeroOptimizer(model, stage=3, mixed_precision=BF16, process_group=transport)
        model.inner.requires_grad_(False)
        buckets = parts_of(optimizer).storage.buckets
        assert all(isinstance(bucket.weights, RoundedShard) for bucket in buckets)
        save(tmp_path / "saved", optimizer).result()
        assert not [kept for bucket in buckets for kept in bucket.weights.kept()]

    on_threads(2, program)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_weights_have_their_mode_also_in_groups_that_keep_their_options(mode: str, tmp_path: Path) -> None:
    def in_both(model: nn.Module, optimizer: ZeroOptimizer) -> list[Any]:
        found = [copy.deepcopy(model.state_dict())]
        for each in ("eval", "train"):
            getattr(optimizer, each)()
            found.append(copy.deepcopy(model.state_dict()))
        return found

    def write(transport: Transport) -> list[Any]:
        model, optimizer = made(transport, Net, 0, cls=ScheduleFree)
        train(model, optimizer, transport, range(STEPS))
        getattr(optimizer, mode)()
        save(tmp_path / "saved", optimizer)
        return in_both(model, optimizer)

    def read(transport: Transport) -> list[Any]:
        model = seeded(1, Net)
        first, *rest = model.parameters()
        groups = [{"params": [first]}, {"params": rest}]
        optimizer = ZeroOptimizer(groups, ScheduleFree, stage=1, module=model, process_group=transport)
        restored = load(tmp_path / "saved", optimizer, strict=False, rng=False)
        assert sum("the options of param group" in line for line in restored.not_restored) == 2
        return in_both(model, optimizer)

    expected = on_threads(2, write)[0]
    for found in on_threads(3, read):
        assert_same_value(found, expected, "weights")


def test_a_tied_tensor_is_found_by_each_of_its_names_and_has_states_once(tmp_path: Path) -> None:
    """It is saved by the first one. A model may register them in another order, or tie them no more."""
    _, before = saved(tmp_path / "saved", lambda: Net(tied=True))

    def program(transport: Transport) -> None:
        _, first = made(transport, lambda: Net(tied=True, head_first=True), 1)
        assert not load(tmp_path / "saved", first, rng=False).not_restored
        by_name = {name.replace("head", "words"): states for name, states in states_of(first).items()}
        assert_same_value(by_name, before, "states")
        model, optimizer = made(transport, Net, 1, transport.world_size)
        was_tied = "was tied to 'words.weight' when it was saved"
        text = error_of(load, tmp_path / "saved", optimizer, rng=False)
        assert f"'head.weight' {was_tied}, so it has no states of its own" in text
        load(tmp_path / "saved", optimizer, with_states=False, rng=False)
        weights = weights_of(optimizer)
        restored = load(tmp_path / "saved", optimizer, strict=False, rng=False)
        assert (restored.missing_keys, restored.not_restored) == ((), (ANEW.format("head.weight", f"it {was_tied}"),))
        found = weights_of(optimizer)
        assert_same_value(weights, found, "weights")
        assert_same_bits(found["head.weight"], found["words.weight"])
        assert_same_value(states_of(optimizer), before, "states")
        train(model, optimizer, transport, range(1))
        for name in ("head.weight", "words.weight"):
            restored = load(tmp_path / "saved", optimizer, strict=False, rng=False, rename={name: None})
            assert restored.missing_keys == (name,)
        assert_same_value(states_of(optimizer)["head.weight"], before["words.weight"], "states")

    for world in (1, 2, 3):
        on_threads(world, program)


FAILED = "resize: the function failed for 'other', of shape (5,) in the checkpoint and (5, 2) in the model"
NO_FILE = "rename: the function failed for 'other' (FileNotFoundError: "
BAD: list[tuple[dict[str, Any], str]] = [
    ({"rename": {"innr.weight": "body.weight"}}, "rename: the checkpoint has no 'innr.weight'"),
    (
        {"rename": lambda name: name.replace("bias", "weight")},
        "rename: 'inner.weight' and 'inner.bias' of the checkpoint would both become 'inner.weight'",
    ),
    ({"rename": lambda name: 3}, "is 3, neither a text nor None"),
    ({"rename": ["inner.weight"]}, "rename must be a mapping from saved names to new ones, or a function"),
    ({"resize": True}, "resize must be a function of a name and two shapes, not True"),
    ({"rename": lambda name: Path("no such map").read_text()}, NO_FILE),
    ({"resize": lambda name, shape: True}, f"{FAILED} (TypeE"),
    ({"resize": lambda *_: True}, "which differ in more than their first dimension: return False for it"),
    ({"strict": "no"}, "strict must be True or False, not 'no'"),
    ({"strict": True}, "in the model: it is that of another model. … both have, pass strict=False"),
]
OF_RANK_1: list[tuple[dict[str, Any], str]] = [
    ({"resize": lambda *_: {}[0]}, f"{FAILED} (KeyEr"),
    ({"rename": None}, "rank 1 passes other strict=, rename= or resize= than rank 0"),
]


def test_what_cannot_be_is_an_error_on_every_rank_and_nothing_changes(tmp_path: Path) -> None:
    saved(tmp_path / "saved")

    def program(transport: Transport) -> None:
        model, optimizer = made(transport, later, 1)
        before = copy.deepcopy(model.state_dict())
        for place, (given, words) in enumerate([*BAD, *OF_RANK_1]):
            own = {"resize": None, **given} if place < len(BAD) or transport.rank else {}
            assert_in_order(words, error_of(load, tmp_path / "saved", optimizer, **{**LOADED, **own}))
            assert_same_value(model.state_dict(), before, "the model")
            optimizer.exchange(b"")

    on_threads(2, program)
