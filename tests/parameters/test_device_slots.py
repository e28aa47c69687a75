"""Slots on the boundaries of an accelerator, tested on the CPU: nothing but the padding may change.

`test_layout` has the geometry of real devices. Here the CPU's slots lie on 512 bytes, too.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from collectives import Transport, on_threads
from zero import MixedPrecision, ZeroOptimizer
from zero.core import layout
from zero.core.layout import Dtypes
from zero.step.throwaway import Setting
from zero.step.trial import placed

from ..checkpoint.runs import BF16, Topology, content, digests_of, run
from ..support.models import odd_batches, odd_loss
from ..support.programs import Program, compare, locked_build, run_rank

BOUNDARY = 512
SMALL = 0.005  # MiB: several parameters in a bucket, and several buckets


@pytest.fixture
def device_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "slot_bytes", lambda device: BOUNDARY)


@pytest.mark.usefixtures("device_slots")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "program",
    [
        Program(2, 0, bucket_cap_mb=SMALL),
        Program(3, 0, "adamw fused", bucket_cap_mb=SMALL, precision=BF16),
        Program(2, 0, "shampoo", bucket_cap_mb=SMALL),
        Program(4, 0, "sgd momentum", bucket_cap_mb=SMALL, sharding_factor=2),
    ],
    ids=["adamw", "bf16", "by parameter", "replicas"],
)
@pytest.mark.by_default("adamw-3", "bf16-2", "by parameter-3", "replicas-1")
def test_the_bits_are_those_of_the_plain_loop(program: Program, stage: int) -> None:
    program = replace(program, stage=stage, sharding_factor=program.sharding_factor if stage else None)
    compare(program, on_threads(program.world_size, lambda transport: run_rank(program, transport)))


@pytest.mark.usefixtures("device_slots")
@pytest.mark.parametrize("collective", ["pairwise", "shared"])
@pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.by_default("1-fp32-pairwise", "3-bf16-pairwise", "3-fp32-shared")
def test_parameters_lie_on_the_boundaries_in_forwards(
    stage: int, precision: MixedPrecision | None, collective: str
) -> None:
    """Relative to their memory, which a device's allocator puts on such a boundary."""

    def program(transport: Transport) -> list[int]:
        model, found = locked_build(0), list[int]()
        optimizer = ZeroOptimizer(
            model,
            torch.optim.AdamW,
            stage=stage,
            process_group=transport,
            bucket_cap_mb=SMALL,
            collective=collective,
            mixed_precision=precision,
            lr=1e-2,
        )

        def note(module: nn.Module, *_: object) -> None:
            for parameter in module.parameters(recurse=False):
                if parameter.numel():
                    found.append(parameter.data_ptr() - parameter.untyped_storage().data_ptr())

        for module in model.modules():
            if not list(module.children()):
                module.register_forward_hook(note)
        for step in range(2):
            odd_loss(model, odd_batches(transport.world_size, step)[transport.rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        return found

    for found in on_threads(2, program):
        assert len(found) > 30
        assert any(found)
        assert not [offset for offset in found if offset % BOUNDARY]


@pytest.mark.parametrize(
    "topology", [Topology(3, 1, SMALL), Topology(2, 3, SMALL, precision=BF16), Topology(4, 2, SMALL, factor=2)], ids=str
)
@pytest.mark.by_default("2-stage3-0.005MiB")
def test_a_checkpoint_has_the_same_bytes_and_is_loaded_where_slots_lie_elsewhere(
    topology: Topology, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "undisturbed", topology, 3)
    run(tmp_path / "here", topology, 2)
    monkeypatch.setattr(layout, "slot_bytes", lambda device: BOUNDARY)
    run(tmp_path / "there", topology, 2)
    assert digests_of(tmp_path / "here", 2) == digests_of(tmp_path / "there", 2)
    assert content(tmp_path / "here", 2) == content(tmp_path / "there", 2)
    run(tmp_path / "here", topology, 1)
    assert content(tmp_path / "here", 3) == content(tmp_path / "undisturbed", 3)


def test_on_a_device_a_class_is_tried_on_lengths_that_are_no_multiple_of_four() -> None:
    """As a whole; its first half is such a multiple, as all pieces are that end at a cut."""
    setting = Setting(0, Dtypes.all(torch.float32), torch.device("cuda"), ((3,),))
    lengths = [shape[0] for _, shape in placed([setting], [1])]
    assert any(length % 4 for length in lengths)
