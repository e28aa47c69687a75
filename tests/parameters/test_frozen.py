"""Frozen parameters that cannot be laid out stay whole and alike on all ranks; trained ones are refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from collectives import Transport, on_threads
from zero import MixedPrecision, ZeroOptimizer

from ..support.errors import assert_in_order, error_of
from ..support.loops import PlainLoop
from ..support.plain import assert_same_states, assert_same_value, share
from ..support.quantised import COPIED, WIDTH, assert_same_qlora, inside, qlora
from ..support.rows import rows

STAGES = pytest.mark.parametrize("stage", [2, 3])
BF16 = MixedPrecision(torch.bfloat16)
BATCHES = [
    (torch.randn(4, WIDTH, generator=g), torch.randn(4, 3, generator=g))
    for g in map(torch.Generator().manual_seed, range(8))
]


def zero(given: Any, group: Any, stage: int, **more: Any) -> ZeroOptimizer:
    more = {"optimizer_class": torch.optim.AdamW, "bucket_cap_mb": 0.0005, "lr": 1e-2, **more}
    return ZeroOptimizer(given, stage=stage, process_group=group, **more)


def train(model: nn.Module, optimizer: ZeroOptimizer, begin: int = 0, end: int = len(BATCHES)) -> None:
    for inputs, targets in share(BATCHES[begin:end], optimizer.rank, optimizer.world_size):
        nn.functional.mse_loss(model(inputs).float(), targets).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()


def plain(model: nn.Module, precision: MixedPrecision | None = None) -> nn.Module:
    PlainLoop(precision=precision).run(model, BATCHES)
    return model


@pytest.mark.parametrize(("stage", "listed", "precision"), rows([(3, True, None)], [(1, True, BF16), (2, False, BF16)]))
def test_a_quantised_base_with_adapters_trains_the_plain_loops_bits(
    stage: int, listed: bool, precision: MixedPrecision | None
) -> None:
    """It is the rank's own memory, and described. What can be copied has rank 0's values."""
    dtype = torch.float32 if precision is None else torch.bfloat16

    def program(group: Transport) -> tuple[nn.Module, str]:
        model = qlora(dtype=dtype)
        with torch.no_grad():
            for number in range(len(COPIED) if group.rank else 0):
                model.blocks[number].weight.copy_(model.blocks[number].weight.flip(0))
        before = {name: [part.data_ptr() for part in inside(p)] for name, p in model.bases().items()}
        given: Any = model if listed else [p for p in model.parameters() if p.requires_grad]
        optimizer = zero(given, group, stage, module=model, mixed_precision=precision)
        train(model, optimizer)
        told, described = optimizer.check_replicas(), optimizer.describe()
        sizes = {name: sum(part.nbytes for part in inside(p)) for name, p in model.bases().items()}
        assert described.replicated_bytes == sizes
        assert f"replicated     {sum(sizes.values()):>14,}  blocks.0.weight" in str(described)
        assert not {name for bucket in described.buckets for name in bucket.names} & set(model.bases())
        after = {name: [part.data_ptr() for part in inside(p)] for name, p in model.bases().items()}
        del before["blocks.3.weight"], after["blocks.3.weight"]  # resolving a conjugate allocates new memory
        assert after == before
        optimizer.close()
        return model, told

    results = on_threads(2, program, timeout=20)
    for model, told in results:
        assert_same_qlora(model, plain(qlora(dtype=dtype), precision))
        assert told == results[0][1]


@STAGES
def test_calls_take_one_as_any_frozen_parameter(stage: int) -> None:
    """States are those of the plain class over all parameters. One that is unfrozen later is an error until it is
    frozen again."""
    expected = qlora()
    reference = torch.optim.AdamW(expected.parameters(), lr=1e-2)
    PlainLoop(optimizer=reference).run(expected, BATCHES[:4])
    saved, trained = copy.deepcopy(reference.state_dict()), copy.deepcopy(expected.state_dict())
    PlainLoop(optimizer=reference).run(expected, BATCHES[4:])

    def program(group: Transport) -> Any:
        model = qlora()
        optimizer = zero(model, group, stage)
        bases = list(model.bases().values())
        for base in bases:
            assert optimizer.full_grad(base) is None
            assert optimizer.state[base] == {}
            assert_same_value(inside(optimizer.full_master(base)), inside(base), "masters")
        with optimizer.gathered(), optimizer.gathered(bases):
            copied, whole = copy.deepcopy(model), model.state_dict()
        assert_same_qlora(copied, qlora())
        for name, base in model.bases().items():
            assert_same_value(inside(whole[name]), inside(base), name)
        with optimizer.join():
            for inputs, targets in BATCHES[: 1 + group.rank]:
                nn.functional.mse_loss(model(inputs), targets).backward()
                with optimizer.gathered(bases[:1]):
                    pass
                assert optimizer.full_grad(bases[0]) is None
                optimizer.zero_grad()
        weight = model.blocks[2].weight.requires_grad_(group.rank == 1)
        told = [error_of(optimizer.clip_grad_norm_, 1.0), error_of(optimizer.step)]
        weight.requires_grad_(False)
        train(model, optimizer, 0, 4)
        optimizer.consolidate_state_dict()
        found = optimizer.state_dict() if group.rank == 0 else None
        optimizer.close()
        model = qlora()
        model.load_state_dict(trained)
        optimizer = zero(model, group, stage)
        optimizer.load_state_dict(saved)
        train(model, optimizer, 4, 8)
        optimizer.close()
        return found, told, model

    results = on_threads(2, program, timeout=20)
    found = results[0][0]
    assert_same_states(found, saved)
    assert found["param_groups"][0]["params"] == saved["param_groups"][0]["params"]
    assert found["param_groups"][0]["param_names"] == [name for name, _ in qlora().named_parameters()]
    for _, told, model in results:
        words = "rank 1: 'blocks.2.weight' requires a gradient now, but was frozen when the optimizer was"
        for text in told:
            assert_in_order(f"{words} … (Parameter, torch.float8_e4m3fn) … freeze it again with requires_", text)
        assert_same_qlora(model, expected)


@pytest.mark.parametrize(("stage", "all_at_once"), rows([(1, True), (3, True)], [(3, False)]))
def test_writes_are_rank_0s_and_of_subclasses_everybodys_and_copies_that_came_apart_are_found(
    stage: int, all_at_once: bool
) -> None:
    def write(model: Any, copied: int, times: int = 2) -> None:
        with torch.no_grad():
            for number in range(copied):
                model.blocks[number].weight.copy_(model.blocks[number].weight.flip(0))
            model.blocks[4].weight.scale.mul_(times)

    def program(group: Transport) -> tuple[nn.Module, list[str]]:
        model = qlora()
        optimizer = zero(model, group, stage)
        chosen = None if all_at_once else list(model.bases().values())

        def differently() -> None:
            with optimizer.gathered(chosen, write=True):
                write(model, 0, 1 + group.rank)

        with optimizer.gathered(chosen, write=True):
            write(model, 0 if group.rank else len(COPIED))
        told = [error_of(differently)]
        model.blocks[4].weight.scale.div_(1 + group.rank)
        train(model, optimizer)
        model.blocks[0].weight.data.add_(group.rank)
        told.append(error_of(optimizer.check_replicas))
        model.blocks[0].weight.data.sub_(group.rank)
        optimizer.close()
        return model, told

    expected = qlora()
    write(expected, len(COPIED))
    plain(expected)
    for model, told in on_threads(2, program, timeout=20):
        assert "ValueError: not the same on every rank: 'blocks.4.weight'" in told[0]
        assert "'blocks.0.weight' differs between rank 0 and rank 1" in told[1]
        assert_same_qlora(model, expected)
