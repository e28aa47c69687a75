"""Slots on the boundaries of an accelerator, given to the CPU, change nothing but the padding."""

from __future__ import annotations

import pytest
import torch

from collectives import on_threads
from zero import MixedPrecision
from zero.core import layout
from zero.core.layout import Dtypes
from zero.step.throwaway import Setting
from zero.step.trial import placed

from ..support.programs import Program, compare, run_rank

SMALL = 0.005  # MiB: several parameters in a bucket, and several buckets
PROGRAMS = [
    Program(
        3, 2, "adamw fused", bucket_cap_mb=SMALL, precision=MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16)
    ),
    Program(2, 3, "shampoo", bucket_cap_mb=SMALL),
    Program(4, 1, "sgd momentum", bucket_cap_mb=SMALL, sharding_factor=2),
]


@pytest.mark.parametrize("program", PROGRAMS, ids=["bf16", "by parameter", "replicas"])
def test_the_bits_are_those_of_the_plain_loop(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "slot_bytes", lambda device: 512)
    compare(program, on_threads(program.world_size, lambda transport: run_rank(program, transport)))


def test_on_a_device_a_class_is_tried_on_lengths_that_are_no_multiple_of_four() -> None:
    """As a whole; its first half is such a multiple, as all pieces are that end at a cut."""
    setting = Setting(0, Dtypes.all(torch.float32), torch.device("cuda"), ((3,),))
    lengths = [shape[0] for _, shape in placed([setting], [1])]
    assert any(length % 4 for length in lengths)
