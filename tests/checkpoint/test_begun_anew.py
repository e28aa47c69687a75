"""What a checkpoint lacks begins anew as the class begins it, and a tensor is found under each of its names."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads
from zero import ZeroOptimizer, load, save

from ..support.errors import error_of
from ..support.models import seeded
from ..support.plain import assert_same_bits, assert_same_value
from ..support.two_modes import ScheduleFree

pytestmark = pytest.mark.filterwarnings("ignore:not restored from")
WORDS, MORE, WIDTH, STEPS = 7, 9, 5, 2
ANEW = "the states of {!r} ({}: they begin anew)"


class Net(nn.Module):
    """A small language model. ``added``: it has a further layer; ``tied``: its head is its embedding, registered
    behind it or (``head_first``) before it."""

    def __init__(
        self, words: int = WORDS, *, added: bool = False, tied: bool = False, head_first: bool = False
    ) -> None:
        super().__init__()
        if head_first:
            self.head = nn.Linear(WIDTH, words, bias=False)
        self.words = nn.Embedding(words, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.added = nn.Linear(WIDTH, WIDTH) if added else nn.Identity()
        if not head_first:
            self.head = nn.Linear(WIDTH, words, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(self.added(self.inner(self.words(tokens)))).square().mean()
        return found


def train(model: nn.Module, optimizer: Any, transport: Transport | None, steps: range) -> None:
    """Take steps of 6 micro-batches, of which a rank runs its own; without a ``transport`` as the plain loop."""
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


def made(model: nn.Module, transport: Transport, cls: Any, stage: int = 2, **options: Any) -> ZeroOptimizer:
    given = {"stage": stage, "process_group": transport, "bucket_cap_mb": 0.0001, "divisor": 6}
    return ZeroOptimizer(model, cls, **given, **options)


def states_of(optimizer: ZeroOptimizer) -> dict[str, dict[str, Any]]:
    optimizer.consolidate_state_dict(None)
    found = copy.deepcopy(optimizer.state_dict())
    names = [name for group in found["param_groups"] for name in group["param_names"]]
    return {name: found["state"][index] for index, name in enumerate(names) if index in found["state"]}


def saved(folder: Path, build: Any, cls: Any, **options: Any) -> dict[str, Any]:
    """Train a model on two ranks and save it. Return its states by name."""

    def program(transport: Transport) -> dict[str, Any]:
        model = seeded(0, build)
        optimizer = made(model, transport, cls, **options)
        if hasattr(optimizer, "train"):
            optimizer.train()
        train(model, optimizer, transport, range(STEPS))
        save(folder, optimizer)
        return states_of(optimizer)

    return on_threads(2, program)[0]


class Eager(torch.optim.Optimizer):
    """Makes its states in the constructor alone, and they do not begin at 0."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["scale"] = torch.full_like(p, 0.5)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["scale"].addcmul_(p.grad, p.grad)
                    p.addcdiv_(p.grad, self.state[p]["scale"].sqrt(), value=-group["lr"])


class Narrow(torch.optim.Optimizer):
    """Its states have the parameter's shape, and do not lie as it does: one has 16 bits, one is in a list."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state.update(sum=torch.zeros_like(p, dtype=torch.bfloat16), last=[torch.zeros_like(p)])
                    state["sum"].add_(p.grad)
                    state["last"][0].copy_(p.grad)
                    p.sub_(state["sum"].float() + state["last"][0], alpha=group["lr"])


NOT_AT_ZERO = "its state {!r} does not begin at 0, which new rows would have"
CLASSES: dict[str, tuple[Any, dict[str, Any], str | None]] = {
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5}, NOT_AT_ZERO.format("sum")),
    "Adagrad from 0": (torch.optim.Adagrad, {"lr": 0.1}, None),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}, NOT_AT_ZERO.format("step_size")),
    "Adam with decay": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}, None),
    "schedule-free": (ScheduleFree, {}, NOT_AT_ZERO.format("z")),
    "eager": (Eager, {}, NOT_AT_ZERO.format("scale")),
    "narrow": (Narrow, {"partition": "parameter"}, "its states do not have its rows"),
}


@pytest.mark.first(4)
@pytest.mark.parametrize("name", CLASSES)
def test_states_that_a_checkpoint_lacks_begin_as_the_class_begins_them(name: str, tmp_path: Path) -> None:
    """Those of a new layer; and those of a grown parameter, if 0 in new rows would not be such a beginning. Training
    goes on as in a plain loop that is given the other states alone."""
    cls, options, why = CLASSES[name]
    before = saved(tmp_path / "saved", Net, cls, **options)
    build = lambda: Net(MORE, added=True)  # noqa: E731

    def program(transport: Transport) -> tuple[Any, Any, Any, Any]:
        model = seeded(1, build)
        optimizer = made(model, transport, cls, stage=transport.world_size, **options)
        restored = load(tmp_path / "saved", optimizer, strict=False, resize=lambda *_: True, rng=False)
        expected = () if why is None else [ANEW.format(f"{part}.weight", why) for part in ("head", "words")]
        assert [line for line in restored.not_restored if "states" in line] == list(expected)
        weights = copy.deepcopy(optimizer.full_state_dict(None))
        group = {key: copy.deepcopy(value) for key, value in optimizer.param_groups[0].items() if key != "params"}
        train(model, optimizer, transport, range(STEPS, STEPS + 1))
        return weights, group, optimizer.full_state_dict(None), states_of(optimizer)

    for weights, group, trained, states in on_threads(3, program):
        plain = seeded(2, build)
        plain.load_state_dict(weights)
        other = cls(plain.parameters(), **{key: value for key, value in options.items() if key != "partition"})
        other.param_groups[0].update({key: value for key, value in group.items() if key in other.param_groups[0]})
        for part, p in plain.named_parameters():
            if part.startswith("inner"):
                other.state[p] = copy.deepcopy(before[part])
            elif not part.startswith("added") and why is None:
                other.state[p] = {key: with_rows(value, p) for key, value in before[part].items()}
        train(plain, other, None, range(STEPS, STEPS + 1))
        for part, p in plain.named_parameters():
            assert_same_bits(trained[part], p, part)
            assert_same_value(states[part], dict(other.state[p]), part)


@pytest.mark.parametrize("name", ["Adagrad", "Rprop", "schedule-free", "eager"])
def test_states_that_are_reset_begin_as_the_class_begins_them(name: str) -> None:
    cls, options, _ = CLASSES[name]

    def program(transport: Transport) -> tuple[Any, Any, Any]:
        model = seeded(0, Net)
        optimizer = made(model, transport, cls, stage=transport.world_size, **options)
        if hasattr(optimizer, "train"):
            optimizer.train()
        train(model, optimizer, transport, range(STEPS))
        optimizer.reset_states()
        weights = copy.deepcopy(optimizer.full_state_dict(None))
        for group in optimizer.param_groups:
            group.update({"k": 0} if "k" in group else {})
        train(model, optimizer, transport, range(STEPS, STEPS + 1))
        return weights, optimizer.full_state_dict(None), states_of(optimizer)

    for weights, trained, states in on_threads(3, program):
        plain = seeded(1, Net)
        plain.load_state_dict(weights)
        other = cls(plain.parameters(), **options)
        if hasattr(other, "train"):
            other.train()
        train(plain, other, None, range(STEPS, STEPS + 1))
        for part, p in plain.named_parameters():
            assert_same_bits(trained[part], p, part)
            assert_same_value(states[part], dict(other.state[p]), part)


def with_rows(value: Tensor, like: Tensor) -> Tensor:
    """Return a state with rows of 0 behind its own."""
    if not value.dim():
        return value.clone()
    return torch.cat((value, torch.zeros(len(like) - len(value), *value.shape[1:])))


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_weights_have_their_mode_also_in_groups_that_keep_their_options(mode: str, tmp_path: Path) -> None:
    def of(transport: Transport, cuts: bool) -> tuple[Any, ZeroOptimizer]:
        model = seeded(int(cuts), Net)
        first = [model.inner.weight] if cuts else []
        rest = [p for p in model.parameters() if not first or p is not first[0]]
        groups = [{"params": members} for members in (first, rest) if members]
        return model, ZeroOptimizer(groups, ScheduleFree, stage=1, module=model, process_group=transport, divisor=6)

    def write(transport: Transport) -> list[Any]:
        model, optimizer = of(transport, False)
        optimizer.train()
        train(model, optimizer, transport, range(STEPS))
        getattr(optimizer, mode)()
        save(tmp_path / "saved", optimizer)
        return seen_in_both(model, optimizer)

    def seen_in_both(model: nn.Module, optimizer: ZeroOptimizer) -> list[Any]:
        found = [copy.deepcopy(model.state_dict())]
        for each in ("eval", "train"):
            getattr(optimizer, each)()
            found.append(copy.deepcopy(model.state_dict()))
        return found

    def read(transport: Transport) -> list[Any]:
        model, optimizer = of(transport, True)
        restored = load(tmp_path / "saved", optimizer, strict=False, rng=False)
        assert sum("the options of param group" in line for line in restored.not_restored) == 2
        return seen_in_both(model, optimizer)

    expected = on_threads(2, write)[0]
    for found in on_threads(3, read):
        assert_same_value(found, expected, "weights")


def test_a_tensor_that_is_tied_no_more_has_its_values_under_each_name_and_new_states(tmp_path: Path) -> None:
    before = saved(tmp_path / "saved", lambda: Net(tied=True), torch.optim.AdamW)

    def program(transport: Transport) -> None:
        model = seeded(1, Net)
        optimizer = made(model, transport, torch.optim.AdamW, stage=transport.world_size)
        text = error_of(lambda: load(tmp_path / "saved", optimizer, rng=False))
        assert "'head.weight' was tied to 'words.weight' when it was saved, so it has no states of its own" in text
        load(tmp_path / "saved", optimizer, with_states=False, rng=False)
        weights = optimizer.full_state_dict(None)
        restored = load(tmp_path / "saved", optimizer, strict=False, rng=False)
        assert not restored.missing_keys
        assert restored.not_restored == (ANEW.format("head.weight", "it was tied to 'words.weight' when it was saved"),)
        found = optimizer.full_state_dict(None)
        assert weights is not None
        assert found is not None
        assert_same_value(weights, found, "weights")
        assert_same_bits(found["head.weight"], found["words.weight"])
        assert not torch.equal(found["head.weight"], seeded(1, Net).head.weight)
        states = states_of(optimizer)
        assert states.keys() == {"words.weight", "inner.weight", "inner.bias"}
        assert_same_value(states, before, "states")
        train(model, optimizer, transport, range(1))

    for world in (1, 2, 3):
        on_threads(world, program)


def test_a_tied_tensor_is_found_by_any_of_its_names(tmp_path: Path) -> None:
    """It is saved by the first one, and a model may register them in another order. A map may name each."""
    before = saved(tmp_path / "saved", lambda: Net(tied=True), torch.optim.AdamW)
    before["head.weight"] = before["words.weight"]

    def program(transport: Transport) -> None:
        model = seeded(1, lambda: Net(tied=True, head_first=True))
        optimizer = made(model, transport, torch.optim.AdamW)
        restored = load(tmp_path / "saved", optimizer, rng=False)
        assert not restored.not_restored
        assert_same_value(states_of(optimizer), {name: before[name] for name in states_of(optimizer)}, "states")
        other = made(seeded(1, Net), transport, torch.optim.AdamW)
        restored = load(tmp_path / "saved", other, strict=False, rng=False, rename={"words.weight": None})
        assert restored.missing_keys == ("words.weight",)
        assert_same_value(states_of(other)["head.weight"], before["words.weight"], "states")
        restored = load(tmp_path / "saved", other, strict=False, rng=False, rename={"head.weight": None})
        assert restored.missing_keys == ("head.weight",)

    on_threads(2, program)


def test_what_has_no_states_may_be_tied_no_more_in_a_strict_restore(tmp_path: Path) -> None:
    def of(transport: Transport, seed: int, *, tied: bool) -> ZeroOptimizer:
        model = seeded(seed, lambda: Net(tied=tied))
        return ZeroOptimizer(model.inner.parameters(), torch.optim.AdamW, module=model, process_group=transport)

    def program(transport: Transport) -> None:
        before = of(transport, 0, tied=True)
        save(tmp_path / "saved", before)
        after = of(transport, 1, tied=False)
        assert not load(tmp_path / "saved", after).not_restored
        one, other = before.full_state_dict(None), after.full_state_dict(None)
        assert one is not None
        assert other is not None
        assert_same_value(other, one, "weights")

    on_threads(2, program)


def test_a_buffer_of_another_kind_of_numbers_is_refused_with_the_remedy(tmp_path: Path) -> None:
    def of(transport: Transport, dtype: torch.dtype) -> ZeroOptimizer:
        model = nn.Linear(2, 2)
        model.register_buffer("seen", torch.zeros(3, dtype=dtype))
        return ZeroOptimizer(model, process_group=transport)

    def program(transport: Transport) -> str:
        save(tmp_path / "saved", of(transport, torch.int64))
        optimizer = of(transport, torch.float32)
        load(tmp_path / "saved", optimizer, strict=False, rename={"seen": None})
        return error_of(lambda: load(tmp_path / "saved", optimizer))

    for text in on_threads(2, program):
        assert "'seen' is torch.int64 in the checkpoint, but torch.float32 in the model: give it the saved" in text
