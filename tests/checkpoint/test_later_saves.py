"""A later save uses the plan of the one before, and has the bytes of a save that plans everything anew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import zero
from collectives import Transport, on_threads
from zero import CheckpointManager, MixedPrecision, ZeroOptimizer, open_checkpoint
from zero.checkpoint.read.reader import Checkpoint
from zero.checkpoint.write.plan import WritePlan

from ..support.models import Odd, odd_batches, odd_loss
from ..support.programs import locked_build

MICRO_BATCHES = 6  # every number of ranks here divides it


class Changing:
    """A training whose model and optimizer change between saves, on one rank."""

    def __init__(self, transport: Transport, stage: int, precision: MixedPrecision | None) -> None:
        self.transport = transport
        self.model: Odd = locked_build(0)
        # 16-bit parameters beside others would be used by one model: there all are in a group from the beginning
        later = {id(p) for p in self.model.last.parameters() if precision is None}
        self.optimizer = ZeroOptimizer(
            [p for p in self.model.parameters() if id(p) not in later],
            torch.optim.Adam,
            stage=stage,
            module=self.model,
            process_group=transport,
            lr=1e-2,
            divisor=MICRO_BATCHES,
            bucket_cap_mb=0.001,
            mixed_precision=precision,
        )
        self.count, self.narrow = 0, precision is not None

    def step(self, extra: bool) -> None:
        batches = odd_batches(MICRO_BATCHES, self.count, extra)
        for batch in batches[self.transport.rank :: self.transport.world_size]:
            odd_loss(self.model, batch).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.model.zero_grad()  # also of parameters that no group has yet

    def change(self, what: str) -> None:
        self.count += 1
        model, (group, *_) = self.model, self.optimizer.param_groups
        offset = model.get_buffer("offset")
        match what:
            case "step" | "step of all":  # only the second one uses all parameters, and makes their states
                self.step(what == "step of all")
            case "lr":
                group["lr"] = group["lr"] / 3  # its text has another length
            case "option of another length":
                group["note"] = "long" * 1500 if "note" not in group else "x" * self.count
            case "freeze":
                model.first.bias.requires_grad_(not model.first.bias.requires_grad)
            case "group":
                if len(self.optimizer.param_groups) == 1 and not self.narrow:
                    self.optimizer.add_param_group({"params": list(model.last.parameters()), "lr": 0.05})
            case "values of a buffer":
                offset.add_(1)
            case "memory of a buffer":
                offset.data = torch.full((13,), float(self.count), dtype=offset.dtype)
            case "registered again":
                model.register_buffer("offset", torch.full((13,), 0.5 + self.count, dtype=offset.dtype))
            case "new buffer":
                model.layers.register_buffer(f"extra{self.count}", torch.arange(self.count))
            case "shape of a buffer":
                model.register_buffer("free", None)
                model.free = torch.ones(self.count % 3, 2, dtype=torch.int64)
            case "not persistent":
                model._non_persistent_buffers_set.symmetric_difference_update({"offset"})
            case "value of a frozen parameter":
                with self.optimizer.gathered(model.frozen, write=True), torch.no_grad():
                    model.frozen.add_(1)
            case "conjugate":  # views that torch conjugates when they are read
                model.register_buffer("phase", torch.full((3,), 1 - 2j * self.count).conj())
            case "loaded":
                self.optimizer.consolidate_state_dict(to=None)
                self.optimizer.load_state_dict(self.optimizer.state_dict())
            case _:
                raise AssertionError(what)


CHANGES = (
    *("step", "step of all", "lr", "option of another length", "freeze", "group", "values of a buffer"),
    *("memory of a buffer", "registered again", "new buffer", "shape of a buffer", "not persistent"),
    *("value of a frozen parameter", "conjugate", "loaded"),
)


def _files(checkpoint: Checkpoint) -> dict[str, bytes]:
    return {path: (checkpoint.path / path).read_bytes() for path in checkpoint.manifest.files}


def _same(later: Path, anew: Path) -> None:
    """Check that two checkpoints have the same files, byte for byte, and say the same of their parameters."""
    mine, theirs = open_checkpoint(later), open_checkpoint(anew)
    mine.verify()
    assert _files(mine) == _files(theirs)
    for name in ("content", "parameters", "param_groups", "not_saved", "block_bytes"):
        assert getattr(mine.manifest, name) == getattr(theirs.manifest, name)


@contextmanager
def counted_plans() -> Iterator[list[WritePlan]]:
    """Yield the plans that are made in the block."""
    made: list[WritePlan] = []
    before = WritePlan.__init__

    def init(self: WritePlan, *arguments: Any) -> None:
        made.append(self)
        before(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WritePlan, "__init__", init)
        yield made


@pytest.mark.parametrize("row", ["2 ranks at stage 2", "3 ranks at stage 3 in bfloat16"])
def test_a_later_save_has_the_bytes_of_one_that_plans_anew(row: str, tmp_path: Path) -> None:
    narrow, world_size, stage = "bfloat16" in row, int(row[0]), int(row.split()[4])
    precision = MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16) if narrow else None

    def program(transport: Transport) -> None:
        training = Changing(transport, stage, precision)
        with CheckpointManager(tmp_path / "later", training.optimizer, asynchronous=False) as checkpoints:
            for number, change in enumerate(CHANGES):
                training.change(change)
                later = checkpoints.save(number, {"step": number}, {"rank": transport.rank})
                assert later is not None
                anew = zero.save(
                    tmp_path / f"anew-{number}", training.optimizer, {"step": number}, {"rank": transport.rank}
                )
                if transport.rank == 0:
                    _same(later.path, anew.path)

    on_threads(world_size, program)


def test_all_stages_and_numbers_of_ranks_write_the_same_bytes_also_in_later_saves(tmp_path: Path) -> None:
    def contents(world_size: int, stage: int) -> list[str]:
        def program(transport: Transport) -> list[str]:
            training, found = Changing(transport, stage, None), []
            folder = tmp_path / f"{world_size}-{stage}"
            with CheckpointManager(folder, training.optimizer) as checkpoints:
                for number, change in enumerate(("step", "lr", "group", "step of all")):
                    training.change(change)
                    saving = checkpoints.save(number)
                    training.step(extra=False)  # while it is written
                    found.append(saving.result(60))
            return found

        first, *others = on_threads(world_size, program)
        assert all(other == first for other in others)
        return first

    plain = contents(1, 0)
    assert len(set(plain)) == len(plain)
    assert all(contents(world_size, stage) == plain for world_size, stage in [(2, 3), (3, 1)])


def test_a_plan_serves_the_next_save_if_no_layout_has_changed(tmp_path: Path) -> None:
    def program(transport: Transport) -> int:
        training = Changing(transport, 2, None)
        with CheckpointManager(tmp_path, training.optimizer, asynchronous=False) as checkpoints:
            training.change("step of all")
            checkpoints.save(0)
            with counted_plans() as made:
                for number, change in enumerate(("step", "lr", "values of a buffer", "memory of a buffer"), start=1):
                    training.change(change)
                    checkpoints.save(number)
        return len(made)

    assert on_threads(1, program) == [0]
