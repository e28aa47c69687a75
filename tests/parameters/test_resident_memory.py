"""In memory that ranks of a host share, each write is whole; graphs hold parameters, whose versions guard them.

What is written elsewhere is told and undone: see the moments of `tests/dials/units.py`.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport
from zero import ZeroOptimizer
from zero.parameters.unit_manager import UnitManager

from ..support.errors import error_of
from ..support.parts import parts_of
from ..support.plain import assert_same_bits, assert_same_model
from ..support.rows import rows
from .stage3 import SLOWLY, TOGETHER, Blocks, on, on_blocks, plain_blocks, size_of, train, zero
from .unit_cases import Opaque

BRIEFLY = 0.3  # seconds in which a rank that wrongly does not wait has gone on; a right one takes them


class PlannedError(Exception):
    """Raised to leave a block."""


def backward(model: Blocks) -> None:
    model(model.inputs).square().sum().backward()


def assert_values(found: list[Tensor], expected: nn.Module) -> None:
    for value, parameter in zip(found, expected.parameters(), strict=True):
        assert_same_bits(value, parameter)


def values_of(model: nn.Module, optimizer: ZeroOptimizer) -> list[Tensor]:
    with optimizer.gathered():
        return [parameter.detach().clone() for parameter in model.parameters()]


def waiting(over: threading.Event) -> tuple[type[torch.optim.SGD], set[int]]:
    """Return a class whose steps wait for an event on the ranks, which are threads, whose numbers are in a set."""
    late: set[int] = set()

    class Late(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if threading.get_ident() in late:
                over.wait(BRIEFLY)
            return super().step(closure)

    return Late, late


@pytest.mark.parametrize(("width", "held"), rows([(4, 0)], [(40, 1)]))
def test_a_step_or_block_ends_on_a_rank_when_every_rank_has_written(
    width: int, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 writes late. A view that rank 0 has of any unit shows only new values when its step or block ends.

    So it is if the block raises, inside another one.
    """
    stepped, left, commit = threading.Event(), threading.Event(), UnitManager.commit
    late_class, late = waiting(stepped)

    def commit_late(manager: UnitManager, *given: Any) -> None:
        if manager.shard_group.rank:
            left.wait(BRIEFLY)
        commit(manager, *given)

    monkeypatch.setattr(UnitManager, "commit", commit_late)

    def act(model: Blocks, optimizer: ZeroOptimizer) -> tuple[list[Tensor], list[Tensor]]:
        with optimizer.gathered():
            view = model.weight(held).detach()
        backward(model)
        late.update([threading.get_ident()] * optimizer.rank)
        optimizer.step()
        late.discard(threading.get_ident())
        shown = [view.clone()]
        stepped.set()
        seen = values_of(model, optimizer)
        with optimizer.gathered(model.weight(held)):
            with suppress(PlannedError), optimizer.gathered(model.weight(held), write=True):
                model.weight(held).data.mul_(2)
                raise PlannedError
            shown += [view.clone(), model.weight(held).detach().clone()]
            left.set()
        return shown, seen

    expected = plain_blocks(width, 1)
    for (shown, seen), _ in on_blocks("common", width, act, optimizer_class=late_class):
        assert_values(seen, expected)
        assert_same_bits(shown[0], expected.weight(held))
        for value in shown[1:]:
            assert_same_bits(value, expected.weight(held) * 2)


def test_nobody_writes_while_another_rank_reads() -> None:
    """Rank 1 stays in its forward, while rank 0 is inside a block that writes, where nothing is gathered."""
    written = threading.Event()

    def act(model: Blocks, optimizer: ZeroOptimizer) -> Tensor:
        if optimizer.rank == 1:
            model[0].register_forward_hook(lambda *_: [None, written.wait(BRIEFLY)][0])
        with torch.no_grad():
            output: Tensor = model(model.inputs)
        with optimizer.gathered(model.weight(1), write=True):
            model.weight(1).data.mul_(2)
        written.set()
        return output

    for output, model in on_blocks("common", 4, act):
        assert_same_bits(output, Blocks(4)(torch.ones(2, 4)))
        assert_same_model(model, plain_blocks(4, 1, doubled=1))


def test_an_interrupt_of_the_wait_for_the_others_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()
    late_class, late = waiting(begun)

    def act(model: Blocks, optimizer: ZeroOptimizer) -> tuple[bool, Tensor]:
        backward(model)
        resident: Any = parts_of(optimizer).storage.manager.resident  # type: ignore[attr-defined]
        wait, interrupted = resident.wait_for_writes, []

        def interrupt() -> None:
            if optimizer.rank == 0 and resident._writing is not None and not interrupted:
                interrupted.append(True)
                raise KeyboardInterrupt
            wait()

        monkeypatch.setattr(resident, "wait_for_writes", interrupt)
        late.update([threading.get_ident()] * optimizer.rank)
        with suppress(KeyboardInterrupt):
            optimizer.step()
        late.discard(threading.get_ident())
        with torch.no_grad():
            if optimizer.rank == 0:
                model[0].register_forward_pre_hook(lambda *_: begun.set())
            return bool(interrupted), model(model.inputs)

    results = on_blocks("common", 4, act, optimizer_class=late_class)
    assert [interrupted for (interrupted, _), _ in results] == [True, False]
    for (_, output), model in results:
        assert_same_bits(output, plain_blocks(4, 1)(torch.ones(2, 4)))
        assert_same_model(model, plain_blocks(4, 2))


def test_common_memory_that_runs_out_leaves_the_units_of_before_resident() -> None:
    def program(transport: Transport) -> tuple[list[tuple[int, int]], str, nn.Module]:
        model = Blocks(4)
        weights = [model.weight(number) for number in range(3)]
        optimizer = zero(weights, transport, module=model, lr=SLOWLY)
        storage: Any = parts_of(optimizer).storage
        storage._shard_group.common = lambda sizes: None
        optimizer.add_param_group({"params": [p for p in model.parameters() if p.dim() == 1]})
        kinds = [(len(unit.resident), len(unit.gathered.buffers)) for unit in storage.manager.units[1:]]
        train(model, optimizer, model.inputs)
        kept = model(model.inputs).square().sum()
        train(model, optimizer, model.inputs)
        said = error_of(kept.backward)
        optimizer.zero_grad()
        optimizer.close()
        return kinds, said, model

    for kinds, said, model in on("common", program):
        assert kinds == [(1, 1)] * 3
        assert "modified by an inplace operation" in said or "was changed by a step or an edit" in said
        assert_same_model(model, plain_blocks(4, 2))


CHANGED = "modified by an inplace operation"


def released(model: Blocks) -> list[bool]:
    """Return which of the weights are released."""
    return ["is released: at stage 3" in error_of(model.weight(number).sum) for number in range(3)]


@TOGETHER
def test_a_unit_whose_output_hides_tensors_stays_until_the_backward_or_the_step_ends(world: str) -> None:
    def act(model: Blocks, optimizer: ZeroOptimizer) -> list[list[bool]]:
        hidden = model[0].register_forward_hook(lambda _, __, out: Opaque(out))
        model[1].register_forward_pre_hook(lambda _, args: (getattr(args[0], "hidden", args[0]),))
        with torch.no_grad():
            model(model.inputs)
        seen = [released(model)]
        loss = model(model.inputs).square().sum()
        seen.append(released(model))
        loss.backward()
        seen.append(released(model))
        optimizer.zero_grad()
        model(model.inputs)
        optimizer.step()
        seen.append(released(model))
        hidden.remove()
        model(model.inputs)
        seen.append(released(model))
        return seen

    for seen, _ in on_blocks(world, 4, act):
        assert [unit[:2] for unit in seen] == [[True, True], [False, True], [True, True], [True, True], [True, True]]


@TOGETHER
def test_inside_a_backward_a_unit_is_released_when_the_next_is_reached(world: str) -> None:
    def act(model: Blocks, _: ZeroOptimizer) -> list[list[bool]]:
        seen: list[list[bool]] = []
        with model[1].register_full_backward_pre_hook(lambda *_: seen.append(released(model))):
            model(model.inputs.clone().requires_grad_()).sum().backward()
        return [*seen, released(model)]

    for seen, _ in on_blocks(world, 4, act):
        assert seen == [[True, False, True], [True, True, True]]


@TOGETHER
def test_a_step_counts_the_changes_of_all_ranks_on_every_rank(world: str) -> None:
    """A rank that has used only other weights, and owns no element of these, raises as well.

    A graph of weights that no rank used in the step stays right.
    """

    def act(model: Blocks, optimizer: ZeroOptimizer) -> list[str]:
        inputs = model.inputs.clone().requires_grad_()  # else its graph needs no weight
        kept = [model[number](inputs).square().sum() for number in range(3)]
        model[optimizer.rank](model.inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return [error_of(graph.backward) for graph in kept]

    for messages, _ in on_blocks(world, 4, act):
        assert [CHANGED in message for message in messages] == [number < size_of(world) for number in range(3)]
        assert messages[2] == "nothing"
