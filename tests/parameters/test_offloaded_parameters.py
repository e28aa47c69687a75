"""Parameters in the host's memory at stage 3: the plain loop's bits, the formulas' bytes, and what is refused.

There is no device here: the CPU takes its place, and each copy is made. That they are ordered on streams is shown by
`test_streams_are_ordered`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from collectives import Transport, on_threads, solo
from zero import MixedPrecision, Offload, ShardedAverage, ZeroOptimizer, load, save
from zero.parameters.gathered.units import GatheredBuffer
from zero.runtime.offload import Staging

from ..contract.space import HABITS
from ..support.errors import error_of
from ..support.limits import BOUND
from ..support.models import odd_batches, odd_loss
from ..support.narrowed import PRECISIONS
from ..support.plain import assert_same_model
from ..support.programs import Program, check, locked_build
from ..support.rows import without
from .nested_units import ODD

ON_HOST = Offload("cpu", parameters="cpu")


pytestmark = pytest.mark.usefixtures("copied_from_the_host")


def program(ranks: int, optimizer: str, precision: str, habit: str, **others: Any) -> Program:
    numbers = PRECISIONS.get(precision)
    options = {"collective": "pairwise" if ranks > 1 else "auto", "scaled": habit == "scales", **others}
    return Program(ranks, 3, optimizer, offload=ON_HOST, precision=numbers, steps=HABITS[habit], **options)


ROWS = {
    "alone in bf16": program(1, "adamw fused", "bf16", "no sync"),
    "alone": program(1, "adagrad", "", "freezes"),
    "two in bf16": program(2, "adamw", "bf16", "freezes"),
    "two by parameter": program(2, "shampoo", "", "zeros"),
    "two in bf16, evaluated": program(2, "schedule-free", "bf16", "freezes"),
    "three, scaled": program(3, "adamw", "fp16", "scales"),
    "six": program(6, "sgd momentum", "", "clips"),
    "four, two copies": program(4, "adamw", "bf16", "no sync", sharding_factor=2),
    "alone, kept whole": program(1, "adamw", "bf16", "no sync", reshard=False),
    "five": program(5, "adamw fused", "bf16", "clips", collective="auto"),
    "four copies": program(4, "sgd momentum", "bf16", "clips", sharding_factor=1),
    "two, kept whole": program(2, "adamw", "", "clips", reshard=False),
    "two, units inside units": program(2, "adamw", "bf16", "clips", units=ODD["inside units"]),
    "alone, units kept inside units": program(1, "adamw", "bf16", "no sync", units=ODD["kept inside units"]),
    "two, units kept inside units": program(2, "adamw", "bf16", "freezes", units=ODD["kept inside units"]),
}
IN_CI = (
    "alone",
    "alone, kept whole",
    "five",
    "four copies",
    "two in bf16, evaluated",
    "two by parameter",
    "six",
    "two, kept whole",
    "alone, units kept inside units",
    "two, units kept inside units",
)


@pytest.mark.first(2)
@pytest.mark.parametrize("row", without(ROWS, *IN_CI))
def test_parameters_on_the_host_change_no_bit(row: str) -> None:
    check(ROWS[row])


def build(transport: Transport, **options: Any) -> tuple[Any, ZeroOptimizer]:
    model = locked_build(0)
    options = {"stage": 3, "offload": ON_HOST, "bucket_cap_mb": 0.0005, "lr": 1e-2, **options}
    if transport.world_size > 1:
        options["collective"] = "pairwise"
    return model, ZeroOptimizer(model, torch.optim.AdamW, process_group=transport, **options)


def train(model: Any, optimizer: ZeroOptimizer, steps: range = range(1)) -> None:
    for step in steps:
        odd_loss(model, odd_batches(1, step)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("offload", [ON_HOST, Offload("cpu", parameters="cpu", step="cpu")])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_parameter_of_16_bits_that_was_frozen_at_first_is_stepped_as_on_the_device(
    ranks: int, offload: Offload
) -> None:
    """It has master weights from then on, beside the parameters that are sent."""

    def run(transport: Transport, place: Offload | None) -> Any:
        model = locked_build(0)
        model.last.weight.requires_grad_(False)
        options = {"stage": 3, "offload": place, "mixed_precision": PRECISIONS["bf16"], "bucket_cap_mb": 0.0005}
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, process_group=transport, lr=1e-2, **options)
        train(model, optimizer)
        model.last.weight.requires_grad_()
        train(model, optimizer, range(1, 3))
        optimizer.close()
        return model

    def both(transport: Transport) -> None:
        model = run(transport, None)
        assert not torch.equal(model.last.weight, locked_build(0).last.weight.to(model.last.weight.dtype))
        assert_same_model(run(transport, offload), model)

    [both(solo())] if ranks == 1 else on_threads(ranks, both, timeout=BOUND)


@pytest.mark.parametrize(("ranks", "precision"), [(1, None), (2, PRECISIONS["bf16"])])
def test_bytes_are_those_of_the_formulas_and_lie_on_the_host(ranks: int, precision: MixedPrecision | None) -> None:
    def run(transport: Transport) -> None:
        model, optimizer = build(transport, mixed_precision=precision)
        model.last.weight.requires_grad_(False)
        train(model, optimizer)
        odd_loss(model, odd_batches(1, 0)[0]).backward()
        optimizer.step()
        found = optimizer.describe()
        for kind in ("parameters", "gradients", "optimizer"):
            assert found.bytes[kind] == found.formula_bytes[kind], kind
        assert 0 < found.bytes["gathered_peak"] <= found.formula_bytes["gathered_peak"]
        held = sum(found.bytes[kind] for kind in ("parameters", "gradients", "optimizer"))
        assert held - found.offloaded_bytes <= 4 * len(list(model.parameters())), "step counts alone are on the device"
        optimizer.close()

    [run(solo())] if ranks == 1 else on_threads(ranks, run, timeout=BOUND)


def test_a_shard_is_copied_for_its_gather_and_for_its_step_and_stays_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[Tensor] = []
    begin, fetch = GatheredBuffer.begin_gather, Staging.fetch

    def begun(self: GatheredBuffer, room: Any) -> None:
        begin(self, room)
        copied.append(self.shard)

    monkeypatch.setattr(GatheredBuffer, "begin_gather", begun)
    model, optimizer = build(solo())
    staged: list[int] = []

    def fetched(self: Staging, kept: Any) -> None:
        fetch(self, kept)
        staged.append(len(kept))

    monkeypatch.setattr(Staging, "fetch", fetched)
    train(model, optimizer, range(2))
    kept = {tensor.data_ptr() for bucket in optimizer._storage.buckets for tensor in bucket.weights.kept()}
    assert copied
    assert not kept & {shard.data_ptr() for shard in copied}
    assert max(staged) == 3, "the weights and two states"
    assert all(buffer.shard.numel() == 0 for buffer in optimizer._storage.manager.buffers())
    optimizer.close()


def test_a_checkpoint_of_stage_1_goes_on_in_the_hosts_memory_of_more_ranks(tmp_path: Path) -> None:
    model, optimizer = build(solo(), mixed_precision=PRECISIONS["bf16"], offload=None, stage=1)
    train(model, optimizer, range(2))
    save(tmp_path / "saved", optimizer)
    train(model, optimizer, range(2, 4))
    optimizer.close()

    def resumed(transport: Transport) -> Any:
        model, optimizer = build(transport, mixed_precision=PRECISIONS["bf16"])
        load(tmp_path / "saved", optimizer)
        train(model, optimizer, range(2, 4))
        optimizer.close()
        return model

    for found in on_threads(2, resumed, timeout=BOUND):
        assert_same_model(found, model)


def test_a_checkpoint_goes_on_without_it_and_elsewhere(tmp_path: Path) -> None:
    def saved(transport: Transport) -> None:
        model, optimizer = build(transport, mixed_precision=PRECISIONS["bf16"])
        train(model, optimizer, range(2))
        save(tmp_path / "saved", optimizer)
        optimizer.close()

    on_threads(2, saved, timeout=BOUND)
    models = []
    for options in ({}, {"offload": None}, {"offload": None, "stage": 1}):
        model, optimizer = build(solo(), mixed_precision=PRECISIONS["bf16"], **options)
        load(tmp_path / "saved", optimizer)
        train(model, optimizer, range(2, 4))
        optimizer.close()
        models.append(model)
    assert_same_model(models[0], models[1])
    assert_same_model(models[0], models[2])


def test_an_edit_through_gathered_is_taken_over_and_another_one_is_refused() -> None:
    trained = []
    for offload in (ON_HOST, None):
        model, optimizer = build(solo(), offload=offload, mixed_precision=PRECISIONS["bf16"])
        train(model, optimizer)
        with optimizer.gathered(write=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        train(model, optimizer, range(1, 3))
        optimizer.close()
        trained.append(model)
    assert_same_model(*trained)
    model, optimizer = build(solo())
    with optimizer.gathered(), torch.no_grad():
        model.last.weight.data.mul_(2)
    assert "'last.weight' was edited while its unit was gathered" in error_of(optimizer.step)


def test_what_does_not_go_together_is_refused_in_one_line() -> None:
    assert "parameters must be 'cpu' or None, not 'disk'" in error_of(Offload, "cpu", parameters="disk")
    for stage in (0, 1, 2):
        assert f'Offload(parameters="cpu") with stage {stage}: ' in error_of(build, solo(), stage=stage)
    _, optimizer = build(solo())
    assert 'Offload(parameters="cpu") with a ShardedAverage: ' in error_of(ShardedAverage, optimizer)
