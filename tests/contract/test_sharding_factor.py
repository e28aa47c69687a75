"""Copies shared by fewer than all ranks: what is chosen, several hosts, and what is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from collectives import Transport, build, on_threads
from zero import ZeroOptimizer

from ..dials.loops import step, steps
from ..dials.record import config_with
from ..support.errors import error_of
from ..support.machine.hosts import Wires
from ..support.machine.program import Clip, Divide
from ..support.machine.run import run
from ..support.parts import parts_of
from ..support.rows import rows
from ..support.sockets import on_hosts, on_wires


@pytest.mark.parametrize(
    ("hosts", "factor", "name"),
    [
        ([0, 0, 0, 0], 2, "shared"),
        ([0, 0, 1, 1], 2, "shared"),
        ([0, 0, 1, 1], 1, "pairwise"),
        ([0, 0, 0, 1], 2, "hierarchical"),
        ([0, 1, 2, 3], 2, "hierarchical"),
    ],
)
def test_what_is_chosen_follows_from_where_the_ranks_of_a_replica_are(
    monkeypatch: pytest.MonkeyPatch, hosts: list[int], factor: int, name: str
) -> None:
    on_hosts(monkeypatch, hosts)

    def program(transport: Transport) -> tuple[str, bool]:
        choice = build(transport, "auto", factor=factor)
        if hosts == [0, 0, 0, 1]:
            assert "is for ranks of one host" in error_of(build, transport, "shared", factor=factor)
            assert "needs a torch" in error_of(build, transport, "all_to_all", factor=factor)
        return choice.collective.name, choice.shard_group.has_common

    found = on_wires(4, program)
    within = all(len(set(hosts[first : first + factor])) == 1 for first in range(0, 4, factor))
    assert found == [(name, within and factor > 1)] * 4


@pytest.mark.parametrize(
    ("hosts", "changes"),
    rows([([0, 0, 0, 1], {"stage": 2, "sharding_factor": 2})], [([0, 0, 1, 1], {"stage": 3, "reshard": 2})]),
)
def test_training_on_several_hosts_is_that_of_the_plain_loop(
    monkeypatch: pytest.MonkeyPatch, hosts: list[int], changes: dict[str, Any]
) -> None:
    on_hosts(monkeypatch, hosts)
    run(config_with({"world_size": 4, **changes}), *step(1, Clip(0.1)), Divide(7.5), *steps(2), backend=Wires())


@pytest.mark.parametrize("reshard", [False, 2])
def test_after_an_evaluation_or_a_step_nothing_is_kept(reshard: bool | int) -> None:
    def program(transport: Transport) -> None:
        model = nn.Sequential(*(nn.Linear(67, 67) for _ in range(5)))
        optimizer = ZeroOptimizer(model, stage=3, process_group=transport, reshard_after_forward=reshard)
        manager: Any = parts_of(optimizer).storage.manager  # type: ignore[attr-defined]

        def kept() -> int:
            buffers = [buffer for unit in manager.units for buffer in unit.gathered.buffers]
            return sum(each is not None for buffer in buffers for each in (buffer.unsharded, buffer.post_forward_shard))

        with torch.no_grad():
            model(torch.ones(2, 67))
        assert not kept()
        loss = model(torch.ones(2, 67)).square().sum()
        assert kept() >= 5
        loss.backward()
        assert not kept()
        model(torch.ones(2, 67))
        assert kept()
        optimizer.step()
        assert not kept()

    on_threads(4, program)
