"""Classes that need whole parameters: each parameter has one owner, and the bits are those of the plain loop."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import solo
from zero import ZeroOptimizer

from ..support.narrowed import PRECISIONS
from ..support.parts import parts_of
from ..support.programs import Program, Round, Step, check
from ..support.rows import only, without
from ..support.sides import Side, same_as_plain
from ..support.warned import own
from .refused import ALONE, OPTIONS, net
from .whole import loss_of, made

STEPS = (
    Step((Round(), Round(sync=False)), clips=((0.1, 2.0),)),
    Step((Round(),), step=False, clear="none"),
    Step((Round(), Round())),
)
P, BF16, FP32 = PRECISIONS, torch.bfloat16, torch.float32
ROWS = {
    "0": Program(2, 0, "shampoo", 0.0005, steps=STEPS),
    "1 fp64": Program(3, 1, "shampoo", 1e-6, dtype=torch.float64, steps=STEPS),
    "2 bf16": Program(3, 2, "shampoo", precision=P["bf16, added up in bf16"], steps=STEPS),
    "3": Program(3, 3, "shampoo", 1e-6, steps=STEPS),
    "3 copies": Program(4, 3, "shampoo", 25.0, sharding_factor=2, reshard=False, steps=STEPS),
}


@pytest.mark.parametrize("row", without(ROWS, "1 fp64", "2 bf16", "3"))
def test_classes_that_need_whole_parameters_give_the_bits_of_the_plain_loop(row: str) -> None:
    check(ROWS[row])


@pytest.mark.parametrize("name", only(ALONE, "DecayScalarsToo", "Projected", "OwnObjects"))
@pytest.mark.filterwarnings("ignore:.* is not element-wise")
def test_all_others_give_the_bits_of_the_plain_loop(name: str) -> None:
    """A state that cannot be sent is named on every rank; its owner alone knows it."""

    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        return loss_of(model, torch.randn(3, 13, generator=torch.Generator().manual_seed(10 * step + rank)))

    def loop(side: Side) -> None:
        for step in range(4):
            side.train(lambda model, rank, step=step: loss(model, step, rank))  # type: ignore[misc]
            side.step()
            side.clear()
        if not isinstance(side.optimizer, ZeroOptimizer):
            return
        told = side.optimizer.describe()
        assert told.formula_bytes["parameters"] == told.bytes["parameters"]
        assert f"by parameter: {len(list(side.model.parameters()))} parameters" in str(told)
        if name == "OwnObjects":
            with pytest.raises(TypeError, match=r"\['keeper'\] is a Keeper"):
                side.optimizer.consolidate_state_dict()

    same_as_plain(loop, net, ALONE[name], settings={"stage": 3}, **OPTIONS)


def test_a_class_is_partitioned_by_parameter_where_it_must_be() -> None:
    def whole(optimizer: ZeroOptimizer) -> set[bool]:
        return {spec.one_owner for spec in parts_of(optimizer).storage.layout.parameters}

    words = r'Adafactor is not element-wise .*\(partition="parameter"\)'
    with pytest.warns(UserWarning, match=words) as said:
        optimizer = ZeroOptimizer(made(), torch.optim.Adafactor, process_group=solo())
    assert [warning.filename for warning in own(said)] == [__file__]
    assert whole(optimizer) == {True}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for asked in (None, "element"):
            assert whole(ZeroOptimizer(made(), torch.optim.AdamW, process_group=solo(), partition=asked)) == {False}
    for partition in ("rows", 1, ""):
        of_group: Any = [{"params": list(made().parameters()), "partition": partition}]
        for params, arguments in ((made(), {"partition": partition}), (of_group, {})):
            with pytest.raises(ValueError, match=r'"element" .* or "parameter" .* param group 0'):
                ZeroOptimizer(params, torch.optim.AdamW, process_group=solo(), **arguments)  # type: ignore[arg-type]
