"""A later save uses the plan of the one before, and has the bytes of a save that plans everything anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zero
from collectives import Transport, on_threads
from zero import CheckpointManager, MixedPrecision, ZeroOptimizer
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


def contents(folder: Path, world_size: int, stage: int, *, narrow: bool, anew: bool) -> list[str]:
    """Save after every change, while the training goes on. ``anew``: check that a save that plans anew is the same."""
    precision = MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16) if narrow else None

    def program(transport: Transport) -> list[str]:
        training, found = Changing(transport, stage, precision), []
        with CheckpointManager(folder / "later", training.optimizer) as checkpoints:
            for number, change in enumerate(CHANGES):
                training.change(change)
                first = zero.save(folder / f"anew-{number}", training.optimizer, {"step": number}) if anew else None
                later = checkpoints.save(number, {"step": number})
                training.step(extra=False)  # while it is written
                found.append(later.result(60))
                if first is not None:
                    manifests = [zero.open_checkpoint(saving.path).manifest for saving in (first, later)]
                    for name in ("content", "parameters", "param_groups", "not_saved", "block_bytes"):
                        assert len({str(getattr(manifest, name)) for manifest in manifests}) == 1, (change, name)
        return found

    found, *others = on_threads(world_size, program)
    assert all(other == found for other in others)
    assert len(set(found)) == len(found)
    return found


def test_a_later_save_is_one_that_plans_anew_at_any_stage_and_number_of_ranks(tmp_path: Path) -> None:
    plain = contents(tmp_path / "1", 1, 0, narrow=False, anew=True)
    assert contents(tmp_path / "3", 3, 3, narrow=False, anew=False) == plain
    contents(tmp_path / "narrow", 2, 3, narrow=True, anew=True)


def test_a_plan_serves_the_next_save_if_no_layout_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[WritePlan] = []
    init = WritePlan.__init__

    def noted(this: WritePlan, *arguments: Any) -> None:
        made.append(this)
        init(this, *arguments)

    monkeypatch.setattr(WritePlan, "__init__", noted)

    def program(transport: Transport) -> None:
        training = Changing(transport, 2, None)
        with CheckpointManager(tmp_path, training.optimizer, asynchronous=False) as checkpoints:
            for number, change in enumerate(("step of all", "step", "lr", "values of a buffer", "memory of a buffer")):
                training.change(change)
                checkpoints.save(number)

    on_threads(1, program)
    assert len(made) == 1
