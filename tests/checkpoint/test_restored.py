"""Everything that training needs comes back from a checkpoint, and what cannot is named."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads
from zero import Offload, ZeroOptimizer, load, open_checkpoint, save
from zero.checkpoint.user_state import digests, generators
from zero.runtime.offload import DiskOffload

from ..support.plain import assert_same_model, assert_same_value
from ..support.pool import GlooPool
from ..support.programs import locked_build
from ..support.quantised import Quantised, assert_same_qlora, qlora
from ..support.rows import rows
from .runs import MICRO_BATCHES, take_steps
from .saves import Training

# -- parameters, buffers, groups ---------------------------------------------------------------------------------------


class Grouped:
    """A training with buffers of all kinds, two groups and a third that is added, and a scheduler, on one rank.

    All values and options depend on the seed.
    """

    def __init__(self, transport: Transport, stage: int, cap: float, seed: int) -> None:
        self.model = locked_build(seed)
        self.model.narrow = nn.Parameter(torch.full((4,), seed, dtype=torch.int8), requires_grad=False)
        self.model.register_buffer("numbers", torch.arange(5) + seed)
        self.model.register_buffer("flag", torch.tensor(seed == 0))
        self.model.register_buffer("passing", torch.ones(2), persistent=False)
        first, added = (list(module.parameters()) for module in (self.model.first, self.model.last))
        others = {id(parameter) for parameter in (*first, *added)}
        rest = [each for each in self.model.parameters() if each.requires_grad and id(each) not in others]
        self.optimizer = ZeroOptimizer(
            [{"params": first, "lr": 0.1 + seed}, {"params": rest, "betas": (0.8 - seed / 2, 0.99)}],
            torch.optim.AdamW,
            module=self.model,
            stage=stage,
            process_group=transport,
            bucket_cap_mb=cap,
            divisor=MICRO_BATCHES,
        )
        self.optimizer.add_param_group({"params": added, "weight_decay": 0.5 * seed})
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [1, 3], 0.5)

    def two_steps(self, first: int) -> None:
        for step in (first, first + 1):
            take_steps(self.model, self.optimizer, step, 1)
            self.scheduler.step()

    def tensors(self) -> dict[str, Tensor]:
        with self.optimizer.gathered():
            return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def all(self) -> tuple[dict[str, Tensor], dict[str, Any], list[dict[str, Any]]]:
        groups = [{key: value for key, value in g.items() if key != "params"} for g in self.optimizer.param_groups]
        return self.tensors(), self.scheduler.state_dict(), groups


@pytest.mark.parametrize("row", rows(["1-2"], ["2-1", "0-2", "3-1"]))
def test_parameters_buffers_groups_and_schedulers_come_back(row: str, tmp_path: Path) -> None:
    """And the model's folder is its state dict."""
    stage, world_size = map(int, row.split("-"))

    def undisturbed(transport: Transport) -> Any:
        training = Grouped(transport, 3, 0.0001, seed=0)
        training.two_steps(0)
        save(tmp_path / "saved", training.optimizer, {"scheduler": training.scheduler, "epoch": 3}, step=2)
        saved = training.tensors()
        training.two_steps(2)
        return saved, training.all()

    def resumed(transport: Transport) -> Any:
        training = Grouped(transport, stage, 0.001, seed=1)
        restored = load(tmp_path / "saved", training.optimizer, {"scheduler": training.scheduler}, rng=False)
        assert (restored.step, restored.state, restored.not_restored) == (2, {"epoch": 3}, ())
        training.two_steps(2)
        return training.all()

    saved, expected = on_threads(2, undisturbed)[0]
    assert_same_value(open_checkpoint(tmp_path / "saved").model_state_dict(), saved, "the model's folder")
    for number, (mine, theirs) in enumerate(zip(on_threads(world_size, resumed)[0], expected, strict=True)):
        assert_same_value(mine, theirs, ("tensors", "scheduler", "groups")[number])


def test_a_narrow_model_has_the_saved_weights_rounded(tmp_path: Path) -> None:
    model, narrow = nn.Linear(5, 3), nn.Linear(5, 3).bfloat16()
    save(tmp_path / "saved", ZeroOptimizer(model, torch.optim.SGD))
    load(tmp_path / "saved", ZeroOptimizer(narrow, torch.optim.SGD))
    assert_same_model(narrow, model.bfloat16())


def test_a_parameter_without_saved_states_begins_anew_over_the_states_it_had(tmp_path: Path) -> None:
    def train(model: nn.ParameterList, optimizer: torch.optim.Optimizer, *used: int) -> None:
        torch.stack([(model[number] ** 2).sum() for number in used]).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    model, plain = (nn.ParameterList([torch.arange(5.0), torch.arange(7.0), torch.arange(3.0)]) for _ in range(2))
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, lr=0.125)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.125)
    train(model, optimizer, 0, 2)
    save(tmp_path / "saved", optimizer)
    train(model, optimizer, 0, 1, 2)  # number 1 has states now, in the memory of its neighbours'
    load(tmp_path / "saved", optimizer)
    assert set(optimizer.state_dict()["state"]) == {0, 2}
    train(plain, reference, 0, 2)
    for used in ((1,), (0, 1, 2)):
        train(model, optimizer, *used)
        train(plain, reference, *used)
    assert_same_model(model, plain)


def test_states_on_disk_leave_memory_after_a_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evicted: list[int] = []
    evict = DiskOffload.evict

    def noted(this: DiskOffload, tensors: Iterable[Tensor]) -> None:
        found = list(tensors)
        evicted.append(sum(tensor.nbytes for tensor in found))
        evict(this, found)

    (tmp_path / "states").mkdir()
    training = Training(None, 0, offload=Offload(tmp_path / "states"))
    monkeypatch.setattr(DiskOffload, "evict", noted)
    training.step(0)
    of_a_step = sum(evicted)
    save(tmp_path / "saved", training.optimizer)
    evicted.clear()
    load(tmp_path / "saved", training.optimizer)
    assert sum(evicted) >= of_a_step > 0


# -- what each rank has ------------------------------------------------------------------------------------------------


def draws() -> tuple[list[float], float, float]:
    return torch.rand(3).tolist(), float(np.random.rand()), random.random()


def test_random_streams_go_on_with_as_many_ranks_and_are_named_otherwise(tmp_path: Path) -> None:
    torch.manual_seed(5)
    optimizer = Training(None, 0).optimizer
    before = digests(generators(), "rng")
    save(tmp_path / "saved", optimizer)
    assert digests(generators(), "rng") == before, "a save leaves them as they are"
    expected = draws()
    load(tmp_path / "saved", Training(None, 0).optimizer)
    assert draws() == expected

    def program(transport: Transport) -> Sequence[str]:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            restored = load(tmp_path / "saved", Training(transport, 1).optimizer)
        assert len([each for each in told if "random generators" in str(each.message)]) <= 1
        return restored.not_restored

    for missing in on_threads(2, program):
        assert missing == ("random generators (saved by 1 ranks, and this run has 2)",)


def drawn_twice(group: Any, rank: int, folder: str) -> tuple[Any, Any]:
    """Return the numbers that are drawn after a save, and after it was restored."""
    training = Training(group, 2)
    torch.manual_seed(rank)
    np.random.seed(rank)
    random.seed(rank)
    save(folder, training.optimizer)
    expected = draws()
    load(folder, training.optimizer)
    return expected, draws()


@pytest.mark.first(0)
def test_each_process_has_its_own_random_streams_back(gloo: GlooPool, tmp_path: Path) -> None:
    found = gloo.run(drawn_twice, str(tmp_path / "saved"), ranks=(0, 1, 2))
    assert all(drawn == expected for expected, drawn in found)
    assert len({str(expected) for expected, _ in found}) == 3


def test_each_rank_has_its_own_state_back_or_one_made_from_all(tmp_path: Path) -> None:
    def write(transport: Transport) -> None:
        save(tmp_path / "saved", Training(transport, 2).optimizer, rank_state={"place": 10 + transport.rank})

    def read(transport: Transport) -> Any:
        return load(tmp_path / "saved", Training(transport, 1).optimizer, rng=False).rank_state["place"]

    def reshard(states: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> Mapping[str, Any]:
        return {"place": [state["place"] for state in states][rank::world_size]}

    def read_otherwise(transport: Transport) -> Any:
        optimizer = Training(transport, 1).optimizer
        with pytest.raises(ValueError, match="rank_state was saved for 3 ranks, and this run has 2"):
            load(tmp_path / "saved", optimizer, rank_state={"place": 0})
        return load(tmp_path / "saved", optimizer, rng=False, reshard=reshard).rank_state["place"]

    on_threads(3, write)
    assert on_threads(3, read) == [10, 11, 12]
    assert on_threads(2, read_otherwise) == [[10, 12], [11]]


# -- what cannot be saved ----------------------------------------------------------------------------------------------


def test_the_inner_tensors_of_a_subclass_are_saved_and_what_torch_cannot_open_is_named(tmp_path: Path) -> None:
    model = qlora(seed=0)
    save(tmp_path / "saved", ZeroOptimizer(model, torch.optim.SGD, lr=0.1))
    checkpoint = open_checkpoint(tmp_path / "saved")
    assert checkpoint.not_saved == ("blocks.5.weight",)
    wrapped = model.blocks[4].weight
    assert isinstance(wrapped, Quantised)
    assert torch.equal(checkpoint.model_state_dict()["blocks.4.weight.whole"], wrapped.whole)

    def program(transport: Transport) -> Sequence[str]:
        other = qlora(seed=1)
        other.blocks[5].weight = model.blocks[5].weight  # every rank has it from elsewhere
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            restored = load(tmp_path / "saved", ZeroOptimizer(other, torch.optim.SGD, lr=0.1, process_group=transport))
        assert_same_qlora(other, model)
        return restored.not_restored

    for missing in on_threads(2, program):
        assert missing[0] == "blocks.5.weight (it could not be saved)"


class Meshed(Quantised):
    """Names a part that is no tensor, as torch's DTensor names its mesh."""

    mesh = "of devices"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["whole", "mesh", "scale"], None


def test_a_part_of_a_subclass_that_is_no_tensor_is_named(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    meshed = Meshed(torch.ones(2, 2, dtype=torch.int8), torch.ones(2, 1))
    model.frozen = nn.Parameter(meshed, requires_grad=False)
    save(tmp_path / "saved", ZeroOptimizer(model, torch.optim.SGD))
    assert open_checkpoint(tmp_path / "saved").not_saved == ("frozen.mesh",)


class Extra(nn.Linear):
    """A module with a state that is no tensor."""

    def get_extra_state(self) -> Any:
        return {"scale": 2}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("it was not saved")


def test_the_extra_state_of_a_module_is_named_as_not_saved(tmp_path: Path) -> None:
    optimizer = ZeroOptimizer(nn.Sequential(Extra(2, 2), nn.Linear(2, 2)), torch.optim.SGD, lr=0.1)
    save(tmp_path / "saved", optimizer)
    assert open_checkpoint(tmp_path / "saved").not_saved == ("0._extra_state",)
    with pytest.warns(RuntimeWarning, match=r"not restored from .*: 0\._extra_state \(it could not be saved\)"):
        restored = load(tmp_path / "saved", optimizer)
    assert restored.not_restored == ("0._extra_state (it could not be saved)",)
