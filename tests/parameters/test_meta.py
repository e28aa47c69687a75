"""Models from the meta device have the values of plain construction, and no rank ever holds more than two units.

What is refused is a law: see `tests/dials/places.py`.
"""

from __future__ import annotations

import weakref
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from collectives import Transport, on_threads, solo
from zero import LazyStateDict, MixedPrecision, ZeroOptimizer

from ..support.errors import assert_in_order, error_of
from ..support.loops import seeded
from ..support.plain import assert_same_bits
from ..support.rows import rows


def net() -> nn.Module:
    """Build a net whose leaves initialize themselves once, in order of registration; a batch norm has buffers, too."""
    blocks = (nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)) for _ in range(4))
    return nn.Sequential(nn.Embedding(50, 8), *blocks, nn.BatchNorm1d(8), nn.Linear(8, 50))


def on_meta(make: Callable[[], nn.Module] = net) -> Any:
    with torch.device("meta"):
        return make()


def zero(model: nn.Module, stage: int = 3, group: Any = None, **given: Any) -> ZeroOptimizer:
    group = solo() if group is None else group
    return ZeroOptimizer(model, **{"stage": stage, "process_group": group, "bucket_cap_mb": 0.001, **given})


def values_of(model: nn.Module, optimizer: ZeroOptimizer) -> dict[str, Tensor]:
    with optimizer.gathered():
        return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


class Lazy(UserDict[str, Tensor]):
    """A state dict that records its reads, and on some ranks cannot be read."""

    def __init__(self, values: dict[str, Tensor], *, torn: bool = False) -> None:
        super().__init__(values)
        self._torn, self.read = torn, list[str]()

    def __getitem__(self, name: str) -> Tensor:
        self.read.append(name)
        if self._torn and name == "6.weight":
            raise OSError("no such block")
        return super().__getitem__(name)


@pytest.mark.parametrize(("stage", "bf16"), rows([(2, False), (3, True)], [(0, True), (3, False)]))
def test_one_seed_gives_the_bits_of_plain_construction(stage: int, bf16: bool) -> None:
    def trained(model: nn.Module) -> list[Tensor]:
        precision = MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16) if bf16 else None
        optimizer = zero(model, stage, lr=1e-2, mixed_precision=precision)
        begun = [optimizer.full_master(parameter) for parameter in model.parameters()]
        tokens = torch.arange(12)
        nn.functional.cross_entropy(model(tokens), tokens).backward()
        optimizer.step()
        optimizer.close()
        return [*begun, *(p.detach() for p in model.parameters()), *model.buffers()]

    model = on_meta()
    model[5].running_mean.note = "kept"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        ours = trained(model)
    assert model[5].running_mean.note == "kept"
    for mine, theirs in zip(ours, trained(seeded(0, net)), strict=True):
        assert_same_bits(mine, theirs)


@pytest.mark.parametrize(("stage", "had"), [(2, True), (3, False), (3, True)])
def test_a_state_dict_is_read_tensor_by_tensor_in_order_of_registration(stage: int, had: bool) -> None:
    """Also for what had memory, and first. It counts whatever it says, and is let go."""
    expected = seeded(3, net).state_dict()
    expected["6.bias"].fill_(float("nan"))
    expected["5.num_batches_tracked"].fill_(torch.iinfo(torch.int64).max)

    def program(transport: Transport) -> None:
        model, given = on_meta(), Lazy(expected)
        if had:
            model[0], model[5] = nn.Embedding(50, 8), nn.BatchNorm1d(8)
        optimizer = zero(model, stage, transport, init_state_dict=given)
        first = [name for name in expected if had and name[0] in "05"]
        assert given.read == [*first, *(name for name in expected if name not in first)]
        reference = weakref.ref(given)
        del given
        assert reference() is None
        for name, value in values_of(model, optimizer).items():
            assert_same_bits(value, expected[name])

    on_threads(2, program)


@pytest.mark.parametrize("listed", [slice(None), slice(1, None, 2), slice(7, None)], ids=["all", "every other", "last"])
def test_at_stage_3_what_came_before_is_sharded_when_a_module_gets_memory(listed: slice) -> None:
    """Of eight units, each with one bucket, at most two have whole tensors at once, whichever are updated."""

    def program(transport: Transport) -> list[int]:
        model = on_meta(lambda: nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8))))
        held = []

        def init(module: nn.Module) -> None:
            held.append(sum(p.device.type == "cpu" and not hasattr(type(p), "released") for p in model.parameters()))
            nn.init.ones_(module.weight)

        chosen: Any = list(model.parameters())[listed]
        zero(chosen, 3, transport, module=model, param_init_fn=init, bucket_cap_mb=0.0001).close()
        return held

    for held in on_threads(2, program):
        assert len(held) == 8
        assert max(held) <= 2


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Embedding(20, 4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 20)
        self.last.weight = self.first.weight


@pytest.mark.parametrize(("stage", "name"), [(1, "last.weight"), (3, "first.weight")])
def test_a_tie_is_found_by_either_of_its_names(stage: int, name: str) -> None:
    weight = torch.randn(20, 4)
    given = {key: value for key, value in Tied().state_dict().items() if key not in ("first.weight", "last.weight")}
    model = on_meta(Tied)
    tied = model.first.weight
    optimizer = zero(model, stage, init_state_dict={**given, name: weight})
    assert_same_bits(values_of(model, optimizer)["first.weight"], weight)
    assert model.first.weight is model.last.weight is tied is optimizer.param_groups[0]["params"][0]


@pytest.mark.parametrize(("stage", "cap"), [(1, 25.0), (3, 1e-4)])
def test_what_a_module_draws_leaves_alone_what_has_values(stage: int, cap: float) -> None:
    def build(model: nn.Module, **given: Any) -> dict[str, Tensor]:
        return values_of(model, zero(model, stage, bucket_cap_mb=cap, **given))

    weight = torch.randn(20, 4)
    given = {name: value for name, value in Tied().state_dict().items() if name not in ("last.weight", "last.bias")}
    found = build(
        on_meta(Tied),
        init_state_dict={**given, "first.weight": weight},
        param_init_fn=lambda module: [parameter.fill_(3) for parameter in module.parameters(False)],
    )
    assert_same_bits(found["last.weight"], weight)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first = nn.Embedding(20, 4).weight
        torch.manual_seed(0)
        assert_same_bits(build(on_meta(Tied))["first.weight"], first)
    norm = on_meta(lambda: nn.BatchNorm1d(2))
    norm.weight = nn.Parameter(torch.full((2,), 5.0))
    assert build(norm)["weight"].eq(5).all()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_state_dict_that_one_rank_cannot_read_is_told_by_all_at_once(stage: int) -> None:
    values = seeded(3, net).state_dict()

    def program(transport: Transport) -> str:
        model, given = on_meta(), Lazy(values, torn=transport.rank == 1)
        with pytest.raises((OSError, ValueError, RuntimeError)) as caught:
            zero(model, stage, transport, init_state_dict=given)
        return str(caught.value)

    for said in on_threads(3, program):
        assert "no such block" in said, "a message brought it, no time limit"
        assert "module '6'" in said


PARTS = ("old.q.weight", "old.k.weight", "old.v.weight")
FUSE = {
    "0.weight": (PARTS, torch.cat),
    "2.weight": (("both.weight",), lambda given: given[0][:4]),
    "2.bias": (("both.weight",), lambda given: given[0][4, :4].clone()),
}
RENAME = {"old.bias": "0.bias", "steps": None}


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


def saved() -> dict[str, Tensor]:
    """Return the values of `net` under other names, with one tensor in three parts and two tensors in one."""
    state = seeded(7, two_layers).state_dict()
    parts = dict(zip(PARTS, (part.clone() for part in state["0.weight"].split(2)), strict=True))
    bias = torch.cat((state["2.bias"], torch.zeros(2)))[None]
    both = torch.cat((state["2.weight"], bias))
    return {**parts, "old.bias": state["0.bias"], "both.weight": both, "steps": torch.tensor(3)}


def build(given: Any, stage: int = 3, group: Any = None) -> dict[str, Tensor]:
    model = on_meta(two_layers)
    return values_of(model, zero(model, stage, group, init_state_dict=given))


@pytest.mark.parametrize(("stage", "by_function"), [(2, True), (3, False)])
def test_the_model_has_the_values_under_its_own_names(stage: int, by_function: bool) -> None:
    expected = seeded(7, two_layers).state_dict()
    rename: Any = (lambda name: RENAME.get(name, name)) if by_function else RENAME

    def program(transport: Transport) -> None:
        source = Lazy(saved())
        found = build(LazyStateDict(source, rename=rename, fuse=FUSE), stage, transport)
        for name, value in expected.items():
            assert_same_bits(found[name], value)
        assert source.read == [*PARTS, "old.bias", "both.weight", "both.weight"]  # as the model registers; no "steps"

    on_threads(2, program)


def test_files_are_read_under_other_names_and_a_shape_is_checked_before_the_model_changes(tmp_path: Path) -> None:
    """Several files are read where they lie."""
    values, files = saved(), [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    save_file({PARTS[0]: values.pop(PARTS[0])}, files[0])
    save_file(values, files[1])
    given = LazyStateDict(files, rename=RENAME, fuse=FUSE)
    assert (len(given), sorted(given)) == (4, ["0.bias", "0.weight", "2.bias", "2.weight"])
    assert given.shape("0.bias") == (6,)
    assert given.shape("0.weight") is given.shape("steps") is None
    for name, value in seeded(7, two_layers).state_dict().items():
        assert_same_bits(build(given)[name], value)
        assert_same_bits(given[name], value)
    fuse = {"0.weight": FUSE["0.weight"], "2.weight": FUSE["2.weight"], "0.bias": FUSE["2.bias"]}
    with pytest.raises(ValueError, match=r"'2.bias' has shape \(4,\), but \(6,\) in the state dict"):
        build(LazyStateDict(files, rename={**RENAME, "old.bias": "2.bias"}, fuse=fuse))
    with pytest.raises(ValueError, match="cannot be read"):
        build(tmp_path / "missing.safetensors")
    with pytest.raises(ValueError, match=r"a.safetensors has '.*', which another file has, too"):
        build([files[0], files[0]])


def clash(_: Any) -> str:
    return "0.bias"


W = "fuse: 'w' needs a pair of a list of saved names and a function"
REFUSED: list[tuple[Any, dict[str, Any], str]] = [  # a source, None for `saved()`; arguments; words
    (None, {"fuse": {"w": (("old.q", "old.k"), torch.cat)}}, "ValueError: … no 'old.q', of which 'w' is to"),
    (None, {"rename": {"new": "old"}}, "ValueError: … rename: the state dict has no 'new'"),
    (None, {"rename": clash}, "ValueError: … 'old.q.weight' and 'old.k.weight' of the state dict would both"),
    (None, {"fuse": FUSE, "rename": {PARTS[0]: "q"}}, "ValueError: … 'old.q.weight' of the state dict is in fuse"),
    (None, {"fuse": {"steps": (PARTS, torch.cat)}}, "ValueError: … 'steps' is to be made, but 'steps' would have that"),
    *((None, {"fuse": {"w": each}}, f"TypeError: … {W}") for each in (("w", torch.cat), torch.cat, (PARTS, 0))),
    (None, {"fuse": [("w", PARTS, torch.cat)]}, "TypeError: … fuse must be a mapping from names of the model"),
    (None, {"rename": RENAME.__getitem__}, "ValueError: … rename: the function failed for 'old.q.weight' (KeyError: "),
    (None, {"rename": {"steps": 3}}, "TypeError: … the new name of 'steps' is 3, neither a text nor None"),
    *((each, {}, "TypeError: LazyStateDict: a state dict is a mapping from names to t") for each in (3, [{}])),
    ("/tmp", {}, "ValueError: LazyStateDict: … cannot be read (it is a folder: list its files)"),
]
UNFIT: list[tuple[Any, str]] = [  # a function that makes '0.weight'; words
    (torch.stack, "ValueError: … '0.weight' has shape (6, 4), but (3, 2, 4) in the state dict"),
    (lambda given: torch.cat(given, dim=2), "ValueError: … '0.weight' could not be made of old.q.weight, "),
    (list, "ValueError: … the function of '0.weight' must return one tensor, not a list"),
]


def test_what_does_not_fit_the_state_dict_is_refused_by_name() -> None:
    for given, arguments, words in REFUSED:
        source = Lazy(saved()) if given is None else given
        assert_in_order(words, error_of(LazyStateDict, source, **arguments))
        assert given is not None or source.read == []
    for function, words in UNFIT:
        fuse = {**FUSE, "0.weight": (PARTS, function)}
        assert_in_order(words, error_of(build, LazyStateDict(saved(), rename=RENAME, fuse=fuse)))
