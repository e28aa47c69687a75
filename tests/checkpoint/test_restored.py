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
from zero.runtime.offload import DiskOffload

from ..support.loops import seeded
from ..support.quantised import Quantised, assert_same_qlora, qlora
from .runs import Topology


class Network(nn.Module):
    """A model with every kind of tensor that a state dict has: tied, frozen, unlisted, narrow, buffers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 5)
        self.norm = nn.BatchNorm1d(7)
        self.again = self.first
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.narrow = nn.Parameter(torch.arange(4, dtype=torch.int8), requires_grad=False)
        self.turned = nn.Parameter(torch.randn(3, 4).t())
        self.register_buffer("numbers", torch.arange(5))
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        found: Tensor = self.last(hidden) + (hidden[:, :4] @ self.turned).sum(1, keepdim=True)
        return found


STEPS, MICRO_BATCHES = 4, 6


class Training:
    """A training with two groups and a third that is added, a scheduler, and random numbers, on one rank."""

    def __init__(self, transport: Transport, topology: Topology) -> None:
        self.model = seeded(0, Network)
        listed = dict(self.model.named_parameters())
        first = [(name, listed[name]) for name in ("first.weight", "first.bias", "turned")]
        last = [(name, listed[name]) for name in ("last.weight", "last.bias")]
        groups = [{"params": first, "lr": 0.1}, {"params": last, "lr": 0.01, "betas": (0.8, 0.99)}]
        self.optimizer = ZeroOptimizer(
            groups,
            torch.optim.AdamW,
            module=self.model,
            stage=topology.stage,
            process_group=transport,
            bucket_cap_mb=topology.cap,
            divisor=MICRO_BATCHES,
        )
        self.optimizer.add_param_group({"params": list(self.model.norm.parameters()), "weight_decay": 0.0})
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [1, 3], 0.5)
        self.seen = 0

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            batches = torch.randn(MICRO_BATCHES, 4, 5, generator=generator)
            for index in range(self.optimizer.rank, MICRO_BATCHES, self.optimizer.world_size):
                self.model(batches[index]).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()

    def tensors(self) -> dict[str, Tensor]:
        with self.optimizer.gathered():
            return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def spoil(self) -> None:
        """Overwrite everything that a checkpoint should bring back."""
        with torch.no_grad(), self.optimizer.gathered(write=True):
            for parameter in self.model.parameters():
                parameter.zero_()
        for buffer in (self.model.numbers, self.model.norm.running_mean):
            assert isinstance(buffer, Tensor)
            buffer.zero_()
        for group in self.optimizer.param_groups:
            group.update(lr=7.0, betas=(0.1, 0.2), weight_decay=5.0)


@pytest.mark.parametrize("row", ["1-2", "2-1", "0-2", "3-1"])
def test_parameters_buffers_groups_and_schedulers_come_back(row: str, tmp_path: Path) -> None:
    stage, world_size = map(int, row.split("-"))

    def undisturbed(transport: Transport) -> tuple[dict[str, Tensor], dict[str, Any], list[dict[str, Any]]]:
        training = Training(transport, Topology(2, 2, 0.0001))
        training.steps(0, 2)
        save(tmp_path / "saved", training.optimizer, {"scheduler": training.scheduler, "epoch": 3}, step=2)
        training.steps(2, STEPS)
        return training.tensors(), training.scheduler.state_dict(), _options(training.optimizer)

    def resumed(transport: Transport) -> tuple[dict[str, Tensor], dict[str, Any], list[dict[str, Any]]]:
        training = Training(transport, Topology(world_size, stage, 0.001))
        training.spoil()
        restored = load(tmp_path / "saved", training.optimizer, {"scheduler": training.scheduler}, rng=False)
        assert (restored.step, restored.state, restored.not_restored) == (2, {"epoch": 3}, ())
        training.steps(2, STEPS)
        return training.tensors(), training.scheduler.state_dict(), _options(training.optimizer)

    before, after = on_threads(2, undisturbed)[0], on_threads(world_size, resumed)[0]
    assert after[1:] == before[1:]
    for name, tensor in before[0].items():
        if "running" not in name and "batches" not in name:  # what a forward writes is each rank's own
            assert tensor.dtype == after[0][name].dtype
            assert torch.equal(tensor, after[0][name]), name


def _options(optimizer: ZeroOptimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def test_the_model_folder_is_the_models_state_dict(tmp_path: Path) -> None:
    def program(transport: Transport) -> dict[str, Tensor]:
        training = Training(transport, Topology(2, 3, 0.0001))
        training.steps(0, 1)
        save(tmp_path / "saved", training.optimizer)
        return training.tensors()

    expected = on_threads(2, program)[0]
    found = open_checkpoint(tmp_path / "saved").model_state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    fresh = Network()
    fresh.load_state_dict(found)


def _draws() -> tuple[list[float], float, float]:
    return torch.rand(3).tolist(), float(np.random.rand()), random.random()


def test_random_streams_go_on_with_as_many_ranks_and_are_named_otherwise(tmp_path: Path) -> None:
    training = _alone()
    torch.manual_seed(5)
    _draws()
    save(tmp_path / "saved", training.optimizer)
    expected = _draws()
    load(tmp_path / "saved", _alone().optimizer)
    assert _draws() == expected

    def program(transport: Transport) -> Sequence[str]:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            restored = load(tmp_path / "saved", Training(transport, Topology(2, 1)).optimizer)
        texts = [str(each.message) for each in told if "random generators" in str(each.message)]
        assert len(texts) <= 1
        return restored.not_restored

    for missing in on_threads(2, program):
        assert missing == ("random generators (saved by 1 ranks, and this run has 2)",)


def _alone() -> Training:
    from ..support.trainings import solo_transport

    return Training(solo_transport(), Topology())


def test_each_rank_has_its_own_state_back_or_one_made_from_all(tmp_path: Path) -> None:
    def write(transport: Transport) -> None:
        optimizer = Training(transport, Topology(3, 2)).optimizer
        save(tmp_path / "saved", optimizer, rank_state={"place": 10 + transport.rank})

    def read(transport: Transport) -> Any:
        return load(tmp_path / "saved", Training(transport, Topology(3, 1)).optimizer, rng=False).rank_state["place"]

    def reshard(states: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> Mapping[str, Any]:
        return {"place": [state["place"] for state in states][rank::world_size]}

    def read_otherwise(transport: Transport) -> Any:
        optimizer = Training(transport, Topology(2, 1)).optimizer
        with pytest.raises(ValueError, match="rank_state was saved for 3 ranks, and this run has 2"):
            load(tmp_path / "saved", optimizer, rank_state={"place": 0})
        return load(tmp_path / "saved", optimizer, rng=False, reshard=reshard).rank_state["place"]

    on_threads(3, write)
    assert on_threads(3, read) == [10, 11, 12]
    assert on_threads(2, read_otherwise) == [[10, 12], [11]]


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


def test_a_parameter_that_was_never_used_has_no_state_after_a_load(tmp_path: Path) -> None:
    def built() -> tuple[nn.ModuleList, ZeroOptimizer]:
        model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])
        return model, ZeroOptimizer(model, torch.optim.AdamW, lr=0.25)

    (saved, source), (_, target) = built(), built()
    for used in ([], [2, 3]):
        save(tmp_path / f"{len(used)}", source)
        open_checkpoint(tmp_path / f"{len(used)}").verify()
        load(tmp_path / f"{len(used)}", target)
        target.consolidate_state_dict(to=0)
        assert sorted(target.state_dict()["state"]) == used
        saved[1](torch.ones(3)).sum().backward()
        source.step()
        source.zero_grad()


def test_states_on_disk_leave_memory_after_a_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evicted: list[int] = []
    evict = DiskOffload.evict

    def noted(this: DiskOffload, tensors: Iterable[Tensor]) -> None:
        found = list(tensors)
        evicted.append(sum(tensor.nbytes for tensor in found))
        evict(this, found)

    (tmp_path / "states").mkdir()
    optimizer = ZeroOptimizer(model := seeded(0, Network), torch.optim.AdamW, offload=Offload(tmp_path / "states"))
    monkeypatch.setattr(DiskOffload, "evict", noted)
    model(torch.ones(4, 5)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    of_a_step = sum(evicted)
    save(tmp_path / "saved", optimizer)
    evicted.clear()
    load(tmp_path / "saved", optimizer)
    assert sum(evicted) >= of_a_step > 0
