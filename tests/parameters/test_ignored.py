"""Parameters that an optimizer leaves to another one, or to nobody: the bits of one plain loop over all of them.

What cannot be ignored is a law: see `tests/dials/places.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from collectives import Transport, on_threads
from zero import ZeroOptimizer

from ..support.limits import BOUND
from ..support.models import seeded
from ..support.narrowed import PRECISIONS
from ..support.plain import assert_same_value
from ..support.sockets import meet
from .apart import IN_A_RING, Modules, Rank, groups_on

BF16 = PRECISIONS["bf16"]


def test_checkpoints_and_state_dicts_leave_it_out_and_training_goes_on_at_other_stages(tmp_path: Path) -> None:
    def program(transport: Transport) -> tuple[Rank, list[Tensor]]:
        transport = Transport(meet(transport))  # groups on one host, as of processes
        rank = Rank(transport.rank, IN_A_RING, groups_on(transport, IN_A_RING))
        rank.train([2.0])
        for name, optimizer in rank.all.items():
            zero.save(tmp_path / name, optimizer)
        whole = {name: optimizer.full_state_dict(to=None) or {} for name, optimizer in rank.all.items()}
        assert whole["all"].keys() == {"all.weight", "all.bias", "offset"}
        others = {f"{name}.weight": torch.ones(3, 3) for name in rank.case.groups}
        rank.first.load_full_state_dict({**others, **whole["all"]})  # the names of what is ignored are skipped
        for name, own in whole.items():
            assert_same_value(rank.all[name].full_state_dict(to=None), own, name)
        rank.close()
        later = replace(IN_A_RING, stages=(3, 1, 0, 3))
        rank = Rank(transport.rank, later, groups_on(transport, later))
        for name, optimizer in rank.all.items():
            zero.load(tmp_path / name, optimizer, rng=False)
        norms = rank.train([2.0], begin=1)
        rank.close()
        return rank, norms

    IN_A_RING.check(on_threads(3, program, timeout=BOUND), [2.0, 2.0])


def test_what_is_ignored_keeps_its_values_and_a_buffer_that_replaces_one_is_ignored_as_well() -> None:
    def program(transport: Transport) -> Tensor:
        with torch.device("meta"):
            model: Any = Modules(("all", "own"))
        model["own"] = nn.Linear(3, 3)
        model["own"].seen = nn.Buffer(torch.tensor(1.0))
        nn.init.constant_(model["own"].weight, transport.rank)
        values = {name: torch.full(value.shape, 0.5) for name, value in model.state_dict().items()}
        if transport.rank == 0:  # names of what is ignored may be missing
            values.pop("own.weight")
        optimizer = ZeroOptimizer(model, process_group=transport, ignored=model["own"], init_state_dict=values)
        model["own"].seen = model["own"].seen + transport.rank
        optimizer.broadcast_buffers()
        assert "own.seen" not in (optimizer.full_state_dict(to=None) or {})
        assert float(model["own"].seen) == 1 + transport.rank
        optimizer.close()
        assert model["all"].weight.eq(0.5).all()
        return model["own"].weight.detach()  # type: ignore[no-any-return]

    for rank, weight in enumerate(on_threads(2, program)):
        assert weight.eq(rank).all()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_nobody_trains_stays_where_it_is_in_its_own_precision(stage: int) -> None:
    def program(transport: Transport) -> None:
        model: Any = seeded(5, lambda: Modules(("own", "all")))
        weight, address = model["own"].weight, model["own"].weight.data_ptr()
        optimizer = ZeroOptimizer(
            model, stage=stage, process_group=transport, mixed_precision=BF16, ignored=model["own"]
        )
        with optimizer.join():
            for step in range(1 + transport.rank):
                x = model["own"](torch.full((1, 3), 1.0 + step))
                model["all"](x.to(torch.bfloat16)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert type(weight.grad) is Tensor  # as autograd has left it, of this rank alone
        with optimizer.gathered(write=True):
            pass
        assert weight.data_ptr() == address
        assert (weight.dtype, model["all"].weight.dtype) == (torch.float32, torch.bfloat16)
        described = optimizer.describe()
        assert [name for bucket in described.buckets for name in bucket.names] == ["all.bias", "all.weight"]
        assert described.bytes["parameters"] == described.formula_bytes["parameters"] <= 2 * 64
        optimizer.close()

    on_threads(3, program)
