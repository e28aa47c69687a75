"""A state dict under other names, and with several tensors as one, gives the model its values tensor by tensor."""

from __future__ import annotations

from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from collectives import Transport, on_threads, solo
from zero import LazyStateDict, ZeroOptimizer

from ..support.loops import seeded
from ..support.plain import assert_same_bits

PARTS = ("old.q.weight", "old.k.weight", "old.v.weight")
FUSE = {
    "0.weight": (PARTS, torch.cat),
    "2.weight": (("both.weight",), lambda given: given[0][:4]),
    "2.bias": (("both.weight",), lambda given: given[0][4, :4].clone()),
}
RENAME = {"old.bias": "0.bias", "steps": None}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


def saved() -> dict[str, Tensor]:
    """Return the values of `net` under other names, with one tensor in three parts and two tensors in one."""
    state = seeded(7, net).state_dict()
    parts = dict(zip(PARTS, (part.clone() for part in state["0.weight"].split(2)), strict=True))
    bias = torch.cat((state["2.bias"], torch.zeros(2)))[None]
    both = torch.cat((state["2.weight"], bias))
    return {**parts, "old.bias": state["0.bias"], "both.weight": both, "steps": torch.tensor(3)}


class Counted(UserDict[str, Tensor]):
    """A state dict that records its reads."""

    def __init__(self, values: dict[str, Tensor]) -> None:
        super().__init__(values)
        self.read: list[str] = []

    def __getitem__(self, name: str) -> Tensor:
        self.read.append(name)
        return super().__getitem__(name)


def build(given: Any, stage: int = 3, group: Any = None) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = net()
    optimizer = ZeroOptimizer(model, stage=stage, process_group=group or solo(), init_state_dict=given)
    with optimizer.gathered():
        found = {name: value.detach().clone() for name, value in model.state_dict().items()}
    optimizer.close()
    return found


@pytest.mark.parametrize(("stage", "by_function"), [(2, True), (3, False)])
def test_the_model_has_the_values_under_its_own_names(stage: int, by_function: bool) -> None:
    expected = seeded(7, net).state_dict()
    rename: Any = (lambda name: RENAME.get(name, name)) if by_function else RENAME

    def program(transport: Transport) -> None:
        source = Counted(saved())
        found = build(LazyStateDict(source, rename=rename, fuse=FUSE), stage, transport)
        for name, value in expected.items():
            assert_same_bits(found[name], value)
        assert source.read == [*PARTS, "old.bias", "both.weight", "both.weight"]  # as the model registers; no "steps"

    on_threads(2, program)


def test_files_are_read_under_other_names_and_a_shape_is_checked_before_the_model_changes(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(saved(), file)
    given = LazyStateDict(file, rename=RENAME, fuse=FUSE)
    assert (len(given), sorted(given)) == (4, ["0.bias", "0.weight", "2.bias", "2.weight"])
    assert given.shape("0.bias") == (6,)
    assert given.shape("0.weight") is given.shape("steps") is None
    for name, value in seeded(7, net).state_dict().items():
        assert_same_bits(build(given)[name], value)
        assert_same_bits(given[name], value)
    fuse = {"0.weight": FUSE["0.weight"], "2.weight": FUSE["2.weight"], "0.bias": FUSE["2.bias"]}
    with pytest.raises(ValueError, match=r"'2.bias' has shape \(4,\), but \(6,\) in the state dict"):
        build(LazyStateDict(file, rename={**RENAME, "old.bias": "2.bias"}, fuse=fuse))


def clash(_: Any) -> str:
    return "0.bias"


ROWS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no source": ({"fuse": {"w": (("old.q", "old.k"), torch.cat)}}, ValueError, "no 'old.q', of which 'w' is to"),
    "no such name": ({"rename": {"new": "old"}}, ValueError, "rename: the state dict has no 'new'"),
    "two become one": ({"rename": clash}, ValueError, "'old.q.weight' and 'old.k.weight' of the state dict would both"),
    "in both": ({"fuse": FUSE, "rename": {PARTS[0]: "q"}}, ValueError, "'old.q.weight' of the state dict is in fuse"),
    "a taken name": (
        {"fuse": {"steps": (PARTS, torch.cat)}}, ValueError, "'steps' is to be made, but 'steps' would have that name"
    ),
    "one source": ({"fuse": {"w": ("both.weight", torch.cat)}}, TypeError, "'w' needs a pair of a list of saved names"),
    "no pair": ({"fuse": {"w": torch.cat}}, TypeError, "fuse: 'w' needs a pair of a list of saved names and a funct"),
    "no function": ({"fuse": {"w": (PARTS, 0)}}, TypeError, "fuse: 'w' needs a pair of a list of saved names and a f"),
    "no mapping": ({"fuse": [("w", PARTS, torch.cat)]}, TypeError, "fuse must be a mapping from names of the model"),
    "a function that fails": (
        {"rename": RENAME.__getitem__}, ValueError, "rename: the function failed for 'old.q.weight' (KeyError: "
    ),
    "no text": ({"rename": {"steps": 3}}, TypeError, "the new name of 'steps' is 3, neither a text nor None"),
}  # fmt: skip


@pytest.mark.parametrize("case", ROWS)
def test_what_does_not_fit_the_state_dict_is_refused_at_once(case: str) -> None:
    arguments, error, words = ROWS[case]
    source = Counted(saved())
    with pytest.raises(error) as raised:
        LazyStateDict(source, **arguments)
    assert words in str(raised.value)
    assert source.read == []


def test_a_source_of_another_kind_is_refused(tmp_path: Path) -> None:
    for source in (net(), None, 3, [{}]):
        with pytest.raises(TypeError, match=r"^LazyStateDict: a state dict is a mapping from names to tensors"):
            LazyStateDict(source)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^LazyStateDict: .* cannot be read \(it is a folder: list its files\)"):
        LazyStateDict(tmp_path)


UNFIT: dict[str, tuple[Any, type[Exception], str]] = {
    "parts that do not fit": (
        torch.stack, ValueError, r"'0.weight' has shape \(6, 4\), but \(3, 2, 4\) in the state dict"
    ),
    "a function that fails": (
        lambda given: torch.cat(given, dim=2), ValueError, "'0.weight' could not be made of old.q.weight, "
    ),
    "no tensor": (list, ValueError, "the function of '0.weight' must return one tensor, not a list"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNFIT)
def test_what_a_function_cannot_make_is_an_error_that_names_it(case: str) -> None:
    function, error, words = UNFIT[case]
    with pytest.raises(error, match=words):
        build(LazyStateDict(saved(), rename=RENAME, fuse={**FUSE, "0.weight": (PARTS, function)}))
