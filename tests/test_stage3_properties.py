"""Laws of stage 3 that a wrong number would break and that no other file asserts by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads
from zero import ZeroOptimizer
from zero.parameters.unit_buffer import State

from .cases import lent, residency_of
from .plain import assert_same_bits, assert_same_model


def zero(params: Any, transport: Transport, **arguments: Any) -> ZeroOptimizer:
    return ZeroOptimizer(params, torch.optim.SGD, stage=3, process_group=transport, lr=0.1, **arguments)


def blocks() -> nn.Sequential:
    """Three units of one size, the same every time."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    for number, parameter in enumerate(model.parameters()):
        nn.init.constant_(parameter, 0.25 + number / 8)
    return model


def test_a_view_that_is_kept_over_a_step_shows_no_old_value() -> None:
    def program(transport: Transport) -> Tensor:
        model = blocks()
        optimizer = zero(model, transport)
        with optimizer.gathered():
            view = model[1].weight.detach()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        return view.clone()

    for view in on_threads(2, program, timeout=5):
        assert bool(view.isnan().all())


def test_a_view_that_is_kept_within_a_step_follows_its_own_parameter() -> None:
    """Not what is gathered into free buffers of its size meanwhile."""

    def program(transport: Transport) -> list[Tensor]:
        model = blocks()
        optimizer = zero(model, transport)
        with optimizer.gathered():
            views = [model[number].weight.detach() for number in range(3)]
        with torch.no_grad():
            model(torch.ones(1, 4))
        return [view.clone() for view in views]

    for views in on_threads(2, program, timeout=5):
        for view, layer in zip(views, blocks(), strict=True):
            assert_same_bits(view, layer.weight)  # type: ignore[arg-type]


def test_a_graph_takes_the_weights_of_its_own_unit_also_where_another_lay_there_before() -> None:
    def program(transport: Transport) -> tuple[list[int], list[str], nn.Module]:
        model = blocks()
        optimizer = zero(model, transport)
        places: list[int] = []
        for number in (0, 2):
            model[number].register_forward_pre_hook(lambda layer, _: places.append(layer.weight.data_ptr()))
        inputs = torch.ones(1, 4, requires_grad=True)  # so that the first unit's weight, too, is saved
        loss = model(inputs).sum()
        with torch.no_grad():
            model(inputs)  # drops every unit at its end
        held = lent(residency_of(optimizer))
        loss.backward()
        optimizer.step()
        optimizer.close()
        return places[:2], held, model

    expected = blocks()
    expected(torch.ones(1, 4)).sum().backward()
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    for (first, last), held, model in on_threads(2, program, timeout=5):
        assert first == last, "the last unit is gathered into the buffer of the first one"
        assert held == [], "the graph holds places, not weights"
        assert_same_model(model, expected)


def test_an_edit_past_the_version_counter_is_told_by_the_owner() -> None:
    def program(transport: Transport) -> str:
        model = blocks()
        optimizer = zero(model, transport)
        model[1].register_forward_pre_hook(lambda layer, _: layer.weight.data.mul_(2))
        model(torch.ones(1, 4)).sum().backward()
        with pytest.raises(RuntimeError) as caught:
            optimizer.step()
        return str(caught.value)

    for message in on_threads(2, program, timeout=5):
        assert "'1.weight' was edited while its unit was gathered" in message


def test_weights_that_are_not_listed_are_rank_0s_too() -> None:
    def program(transport: Transport) -> nn.Module:
        model = blocks()
        with torch.no_grad():
            model[2].weight.mul_(1 + transport.rank)
        optimizer = zero(model[0].parameters(), transport, module=model)
        optimizer.close()
        return model

    for model in on_threads(3, program, timeout=5):
        assert_same_model(model, blocks())


class Path(nn.Module):
    """Runs the blocks that ``order`` names."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks())
        self.order: tuple[int, ...] = (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        for number in self.order:
            x = self.blocks[number](x)
        return x


def test_a_unit_that_was_fetched_in_vain_is_given_back() -> None:
    """The last forward says which unit follows; where it does not, what was fetched goes when the next one comes."""

    def program(transport: Transport) -> list[list[bool]]:
        model = Path()
        optimizer = zero(model, transport)
        units = optimizer._storage.residency.units[1:]  # type: ignore[attr-defined]
        here = []
        for order in ((0, 1, 2), (0, 2)):
            model.order = order
            loss = model(torch.ones(1, 4)).sum()
            here.append([unit.state is not State.SHARDED for unit in units])
            loss.backward()
            optimizer.zero_grad()
        return here

    for here in on_threads(2, program, timeout=5):
        assert here == [[False, False, True]] * 2
