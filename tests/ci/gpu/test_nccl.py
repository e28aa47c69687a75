"""NCCL between ranks on one GPU: the plain loop's bits, replicas' process groups, and a rank that is lost.

NCCL refuses two ranks of one host on one GPU. The pool's processes name hosts of their own to it (`NCCL_HOSTID`), so
their bytes travel through sockets. The library sees one host. Where there is no GPU the tests run on the CPU over gloo,
which only shows that their code works.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.gpt import Shape
from benchmarks.gpt import build as build_gpt
from benchmarks.gpt import loss_fn as cross_entropy
from collectives import CollectiveError, Kind, MismatchError, Tag, Transport, topology
from collectives.algorithms.process_group import AllToAll, Native
from collectives.backends.gloo import connect
from collectives.pool import Pool, holders
from collectives.watching import watch
from zero import ZeroOptimizer
from zero.gradients.agreement import Agreement, Record
from zero.runtime.joining import Joining, UnitOrder

from ...dials.loops import DIALS
from ...dials.record import config_with
from ...support import devices
from ...support.machine.program import Config, Setting
from ...support.machine.run import run
from ...support.models import build, odd_batches, odd_loss, take_steps
from ...support.plain import assert_same_model, plain_step, share
from ...support.pool import SIZE, GlooPool

SOON = 30.0  # seconds in which a survivor can go on; less than the group's time limit
AFTERWARDS = 3.0  # seconds in which NCCL's watchdog could end the process; on the CPU there is none
LOOPS: Any = DIALS[0].values
LOOP = [*LOOPS["no sync"], *LOOPS["clears, zeros"]]
FUSED = {"optimizer": "adamw fused"}
PROGRAMS: dict[str, dict[str, Any]] = {
    **{f"W2 stage {stage}": {"world_size": 2, "stage": stage, **FUSED} for stage in range(4)},
    "W3 stage 3": {"world_size": 3, "stage": 3, "optimizer": "adamw foreach"},
    "W2 stage 3, one bucket a unit": {"world_size": 2, "stage": 3, "optimizer": "sgd momentum", "bucket_cap_mb": 25.0},
    "W2 stage 2, bf16": {"world_size": 2, "stage": 2, "dtype": "bfloat16", **FUSED},
    "W2 stage 3, mixed": {"world_size": 2, "stage": 3, "precision": "bf16", **FUSED},
    "W4 in replicas of 2, stage 1": {"world_size": SIZE, "stage": 1, "sharding_factor": 2},
    "W4 in replicas of 1, stage 2": {"world_size": SIZE, "stage": 2, "sharding_factor": 1, **FUSED},
    "W4 in replicas of 2, stage 3": {"world_size": SIZE, "stage": 3, "sharding_factor": 2},
    "W4 stage 3, kept by 2": {"world_size": SIZE, "stage": 3, "reshard": 2},
    "W2 stage 3, pairwise": {"world_size": 2, "stage": 3, "collective": "pairwise"},
    **{f"W4 stage {k}, fold": {"world_size": SIZE, "stage": k, "collective": "fold", **FUSED} for k in range(4)},
}


@pytest.fixture(params=[devices.DEVICE], scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[devices.Ranks]:
    """Return ranks on a device; on a GPU, in groups of gloo and NCCL."""
    if request.param == "cpu":
        yield devices.Ranks("cpu", request.getfixturevalue("gloo"))
        return
    pool = GlooPool("spawn", "cpu:gloo,cuda:nccl")
    with devices.deterministic_products():
        yield devices.Ranks(request.param, pool)
    pool.stop()


class RankOnHostsOfTwo(devices.RankOnDevice):
    """A rank, for a fold as if neighbours were on one host."""

    def __init__(self, config: Config, setting: Setting, *more: Any) -> None:
        folds = setting.collective == "fold"
        with mock.patch.object(topology, "_hosts_of", return_value=[[0, 1], [2, 3]]) if folds else nullcontext():
            super().__init__(config, setting, *more)


class OnHostsOfTwo(devices.OnDevice):
    rank = RankOnHostsOfTwo


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_give_the_bits_of_the_plain_loop_on_the_same_device(ranks: devices.Ranks, name: str) -> None:
    with devices.deterministic():
        run(config_with({**PROGRAMS[name], "device": ranks.device}), *LOOP, backend=OnHostsOfTwo(ranks.pool))


def attention(device: str) -> tuple[nn.Module, list[Tensor]]:
    shape, sequence = (Shape(2, 2, 64, 256), 32) if device == "cpu" else (Shape(4, 4, 512, 4096), 512)
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(shape.vocabulary, (2, sequence + 1), generator=generator) for _ in range(8)]
    model = build_gpt(shape, sequence, seed=0).to(device, torch.bfloat16)
    return model, [batch.to(device) for batch in batches]


def attention_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return cross_entropy(model(batch[:, :-1]), batch[:, 1:])


def train_attention(group: dist.ProcessGroup, rank: int, device: str, stage: int) -> nn.Module:
    with devices.deterministic():
        model, batches = attention(device)
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=stage, process_group=group, lr=1e-3, fused=True)
        take_steps(model, optimizer, share(batches, rank, 2), attention_loss)
        optimizer.close()
    return model.cpu()


@pytest.mark.parametrize("stage", range(4))
def test_so_does_attention(ranks: devices.Ranks, stage: int) -> None:
    """Its backward on a GPU adds in any order, unless torch is told to be deterministic."""
    models = ranks.run(train_attention, ranks.device, stage, world_size=2)
    with devices.deterministic():
        plain, batches = attention(ranks.device)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)
        for first in range(0, len(batches), 2):
            plain_step(plain, optimizer, attention_loss, batches[first : first + 2], 2)
            plain.zero_grad()
    for model in models:
        assert_same_model(model, plain)


def chosen(group: dist.ProcessGroup, rank: int, device: str) -> tuple[str, str]:
    """Return what the optimizer chose, in its words, and a sum that NCCL adds itself."""
    optimizer = ZeroOptimizer(nn.Linear(8, 8).to(device), torch.optim.SGD, stage=2, process_group=group, lr=0.1)
    told = str(optimizer.describe())
    optimizer.close()
    transport = connect(group).fork()
    native, own = Native(transport), torch.empty(2, device=device)
    source = torch.arange(6, device=device).float() + rank
    tag = Tag(Kind.REDUCE_SCATTER, "a sum", 1)
    native.reduce_scatter(source, [0, 2, 4, 6], own, start=None, tag=tag).wait()
    return told, str(own.tolist())


def test_nccl_is_chosen_for_tensors_on_a_gpu(ranks: devices.Ranks) -> None:
    for rank, (told, summed) in enumerate(ranks.run(chosen, ranks.device, world_size=3)):
        assert ("with NCCL" in told) == (ranks.device != "cpu")
        assert summed == str([6.0 * rank + 3, 6.0 * rank + 6])


def held(group: dist.ProcessGroup, rank: int, device: str) -> list[int]:
    """Return how many hold the memory of each of several gathers a while after its wait, and the bytes of their pool.

    A thread of the backend may let go a little later than the wait ends.
    """
    transport, pool, found = connect(group).fork(), Pool(exact=True), []
    for number in range(5):
        whole = pool.take(transport.world_size * 1000, torch.float32, torch.device(device))
        whole[rank * 1000 : (rank + 1) * 1000] = rank
        bounds = [1000 * each for each in range(transport.world_size + 1)]
        AllToAll(transport).all_gather(whole, bounds, tag=Tag(Kind.ALL_GATHER, "whole", number)).wait()
        until = time.monotonic() + SOON
        while holders(whole) and time.monotonic() < until:
            time.sleep(0.01)
        found.append(holders(whole))
        del whole
    return [*found, pool.held_bytes]


def test_a_backend_lets_go_of_a_gathers_memory_at_its_wait(ranks: devices.Ranks) -> None:
    for found in ranks.run(held, ranks.device, world_size=2):
        assert found == [*[0] * 5, 2 * 1000 * 4]


def rounds(group: dist.ProcessGroup, rank: int, device: str, count: int) -> Tensor:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).to(device)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.01)
    optimizer = ZeroOptimizer(
        model, torch.optim.SGD, stage=2, process_group=group, sharding_factor=2, bucket_cap_mb=0.02, lr=1e-3
    )
    batch = torch.full((4, 64), 0.1 * (rank + 1), device=device)
    for _ in range(count):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).cpu()


def test_hundreds_of_rounds_between_replicas_come_to_their_end(ranks: devices.Ranks) -> None:
    """Three communicators are in use at a time: of a replica, of the owners of a slice, of two neighbours."""
    count = 20 if ranks.device == "cpu" else 500
    first, *others = ranks.run(rounds, ranks.device, count, world_size=SIZE)
    assert all(torch.equal(first, other) for other in others)
    assert first.isfinite().all()


def ends(*_: Any, **__: Any) -> None:
    os._exit(1)


def raises(*_: Any, **__: Any) -> None:
    raise KeyError("a bug")


FAULTS = {"ends": ends, "raises": raises}


def lost(group: dist.ProcessGroup, rank: int, device: str, stage: int, fault: str, folder: Path) -> str:
    model, batches = build().to(device), devices.on(device, odd_batches(4, extra=False))
    optimizer = ZeroOptimizer(
        model, torch.optim.AdamW, stage=stage, process_group=group, collective="all_to_all", bucket_cap_mb=0.0005
    )
    take_steps(model, optimizer, batches[:1])
    if rank == 1:
        mock.patch.object(dist, "all_to_all_single", FAULTS[fault]).start()
    begin = time.monotonic()
    try:
        odd_loss(model, batches[1]).backward()
        optimizer.step()
    except (CollectiveError, KeyError) as error:
        if device != "cpu":
            torch.cuda.synchronize()
        seconds = time.monotonic() - begin
        time.sleep(0.0 if device == "cpu" else AFTERWARDS)
        with pytest.raises(CollectiveError) as closed:
            optimizer.step()
        told = f"{seconds}\n{error}\n{closed.value}"
        (folder / f"rank {rank}").write_text(told)
        return told
    finally:
        mock.patch.stopall()
    return "nothing"


@pytest.mark.parametrize("case", [(1, "ends"), (1, "raises"), (3, "ends"), (3, "raises")], ids=str)
def test_a_failed_rank_is_named_and_the_gpu_is_free_again(
    ranks: devices.Ranks, case: tuple[int, str], tmp_path: Path
) -> None:
    stage, fault = case
    context = pytest.raises(RuntimeError, match="rank 1 died") if fault == "ends" else nullcontext()
    with context:
        ranks.run(lost, ranks.device, stage, fault, tmp_path, world_size=2)
    ranks.pool.stop()  # its group is lost
    seconds, message, closed = (tmp_path / "rank 0").read_text().split("\n")
    assert float(seconds) < SOON
    # on the host rank 0 is in the collective itself until its time limit, after which the error may name no rank
    blocked = ranks.device == "cpu" and (stage, fault) == (3, "raises")
    assert "rank 1" in message or (blocked and "the process group's own collective failed" in message), message
    assert ("over a new process group" in closed) == (ranks.device != "cpu")


ON_A_GPU = pytest.mark.skipif(not devices.HAS_GPU, reason="there is no GPU")
UNIT = Tag(Kind.ALL_GATHER, "a unit", 0, 1)


def watched(group: dist.ProcessGroup, limit: float) -> Transport:
    """Return a transport with a ledger, whose sentinel asks after ``limit`` seconds."""
    transport = connect(group).fork()
    transport.backend.stall_limit = limit
    watch(transport, transport.world_size, torch.device(devices.GPU))
    assert transport.launches is not None
    return transport


def gather(transport: Transport, tag: Tag) -> Tensor:
    size = transport.world_size
    whole = torch.full((1000 * size,), float(transport.rank), device=devices.GPU)
    bounds = [1000 * rank for rank in range(size + 1)]
    AllToAll(transport).all_gather(whole, bounds, tag=tag).wait()
    return whole


def late(group: dist.ProcessGroup, rank: int, limit: float, seconds: float) -> float:
    group._get_backend(torch.device(devices.GPU))._set_default_timeout(timedelta(seconds=limit))
    transport = watched(group, 2.0)
    gather(transport, UNIT)
    transport.exchange(b"", Tag(Kind.EXCHANGE, "a step"))
    if rank == 1:
        time.sleep(seconds)
    return float(gather(transport, replace(UNIT, index=2)).sum().item())


@ON_A_GPU
def test_a_rank_may_be_late_by_more_than_the_time_limit_of_nccl(ranks: devices.Ranks) -> None:
    """The others wait at the gate, on the host. A kernel that waits for so long ends its process."""
    assert ranks.run(late, 20.0, 40.0, world_size=2) == [1000.0] * 2


def in_vain(group: dist.ProcessGroup, rank: int) -> tuple[str, float]:
    """Rank 0's host is inside `item()`, behind a gather that rank 1 does not launch, since it is inside a meeting."""
    transport = watched(group, 2.0)
    gather(transport, UNIT)
    begin = time.monotonic()
    if rank == 0:
        with suppress(RuntimeError):  # of the device, whose collective is aborted
            gather(transport, replace(UNIT, index=2)).sum().item()
    with pytest.raises(CollectiveError) as caught:
        transport.exchange(b"", Tag(Kind.EXCHANGE, "a step"))
    seconds = time.monotonic() - begin
    torch.cuda.synchronize()
    return str(caught.value), seconds


@ON_A_GPU
def test_a_host_that_waits_for_its_device_in_vain_comes_back_and_learns_why(ranks: devices.Ranks) -> None:
    for message, seconds in ranks.run(in_vain, world_size=2):
        assert "rank 0 is in a unit [all_gather, round 0, index 2], but rank 1 is in a step" in message
        assert seconds < 2.0 + 2.0 + SOON / 10
    ranks.pool.stop()  # its group is lost


def other_units(group: dist.ProcessGroup, rank: int) -> str:
    transport = watched(group, SOON)
    gather(transport, UNIT)
    gather(transport, replace(UNIT, index=2 + rank)).sum().item()
    launches = transport.launches
    assert launches is not None
    record = Record(1.0, "open", (), b"", b"", launched=launches.ledger.state)
    with pytest.raises(MismatchError) as caught:
        Agreement(transport, 2, UnitOrder(Joining())).agree("step()", 0, lambda: None, lambda: record, str)
    return str(caught.value)


@ON_A_GPU
def test_mixed_bytes_are_told_before_anything_that_is_kept_has_changed(ranks: devices.Ranks) -> None:
    for message in ranks.run(other_units, world_size=2):
        assert "rank 0 is in a unit [all_gather, round 0, index 2], but rank 1 is in a unit" in message
    ranks.pool.stop()  # its group is lost
