"""Mixed precision: what inputs, outputs, buffers and modules are cast to, by module, and what is refused."""

from __future__ import annotations

import copy
import gc
from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from collectives import solo
from zero import MixedPrecision, ZeroOptimizer

from ..support.by_module import KEEP
from ..support.errors import error_of
from ..support.loops import seeded
from ..support.narrowed import BF16, FP16, FP32
from ..support.plain import assert_same_bits
from ..support.rows import rows

ALL = MixedPrecision(BF16)


class Seen(nn.Linear):
    """A layer that takes any input, and records the dtypes of what it gets in each call."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.seen: list[Any] = []

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        self.seen += [x.dtype] if extra is None else [(x.dtype, extra.dtype)]
        return super().forward(x.to(self.weight.dtype))


class Stack(nn.Module):
    """Layers in a list and by name; the last two share a module, and the first is tied to one of the list."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Seen()
        self.layers = nn.ModuleList([Seen(), nn.Sequential(Seen(), Seen())])
        self.last = Seen()
        self.register_buffer("shift", torch.ones(4))
        self.layers[1].register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x, extra=self.shift)
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.last(x)
        return found


def built(
    precision: Any, model: nn.Module | None = None, updated: Any = None, **arguments: Any
) -> tuple[Any, ZeroOptimizer]:
    """Return a model and its optimizer. ``updated``: what of the model, all of it by default."""
    model = seeded(0, Stack) if model is None else model
    given = {"stage": 1, "process_group": solo(), "module": model, "mixed_precision": precision, **arguments}
    return model, ZeroOptimizer(model if updated is None else updated, torch.optim.SGD, lr=0.1, **given)


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name.removesuffix(".weight"): p.dtype for name, p in model.named_parameters() if name.endswith("weight")}


@pytest.mark.parametrize(("stage", "listed"), [(1, True), (2, False), (3, True), (3, False)])
def test_the_last_pattern_that_matches_a_module_or_one_around_it_decides(stage: int, listed: bool) -> None:
    """Also about parameters that are not updated. ``listed``: all are."""
    wide, model = MixedPrecision(FP16, buffer_dtype=FP16, output_dtype=BF16), seeded(0, Stack)
    patterns = {"*": ALL, "first": KEEP, "layers.1": wide, "layers.?.1": KEEP}
    updated = model if listed else list(model.layers.parameters())
    _, optimizer = built(patterns, model, updated, stage=stage)
    expected = {"first": FP32, "layers.0": BF16, "layers.1.0": FP16, "layers.1.1": FP32, "last": BF16}
    assert dtypes(model) == expected
    assert (model.shift.dtype, model.layers[1].scale.dtype) == (FP32, FP16)
    assert {bucket.dtype for bucket in optimizer.describe().buckets} == {str(BF16), str(FP16), str(FP32)}
    assert model(torch.ones(2, 4)).dtype is BF16
    parts = [model.first, model.layers[0], *model.layers[1], model.last]
    assert [part.seen for part in parts] == [[(FP32, FP32)], [BF16], [FP16], [FP32], [BF16]]
    optimizer.close()


def test_a_function_is_asked_for_each_module_once_and_its_borders_cast() -> None:
    """Modules without a forward are no borders. Inputs stay if a policy says so, as outputs without output_dtype do."""
    asked = []

    def of(name: str, module: nn.Module) -> Any:
        asked.append(name)
        if isinstance(module, nn.ModuleList):
            return MixedPrecision(FP16)
        return MixedPrecisionPolicy(FP32, cast_forward_inputs=name != "last") if name in ("first", "last") else ALL

    model, optimizer = built(of)
    assert asked == 2 * ["", "first", "layers", "layers.0", "layers.1", "layers.1.0", "layers.1.1", "last"]
    model.layers[0].forward = lambda x: x.to(BF16)
    model.last.forward = lambda x: x
    assert model(torch.ones(2, 4)).dtype is BF16
    assert not model.layers[0]._forward_pre_hooks
    assert model.first.seen == [(FP32, FP32)]
    optimizer.close()


def test_a_module_that_two_hold_is_a_border_for_the_one_that_differs() -> None:
    """The name that was registered first counts."""
    shared, entering = Seen(), list[torch.dtype]()

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Sequential(shared) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))  # type: ignore[no-any-return]

    model = Twice()
    model.b.register_forward_pre_hook(lambda _, args: entering.append(args[0].dtype))
    _, optimizer = built({"*": ALL, "b": MixedPrecision(FP16)}, model)
    found = model(torch.ones(2, 4))
    assert (shared.weight.dtype, found.dtype) == (BF16, BF16)
    # the outermost module casts the first call, a border the second
    assert (entering, shared.seen) == ([FP16], [BF16, BF16])
    optimizer.close()


def test_hooks_of_the_user_see_what_was_cast_and_end_with_the_optimizer() -> None:
    model = seeded(0, Stack)
    seen: list[torch.dtype] = []
    model.first.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    model.first.register_forward_hook(lambda *given: seen.append(given[2].dtype))
    _, optimizer = built({"*": ALL, "first": KEEP}, model)
    model(torch.ones(2, 4))
    assert seen == [FP32, BF16]
    copied = copy.deepcopy(model)
    assert_same_bits(copied(torch.ones(2, 4)), model(torch.ones(2, 4)))
    model.float()
    del optimizer
    gc.collect()
    assert model(torch.ones(2, 4)).dtype is FP32
    _, second = built(None, model)
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in (model, *model.layers.modules()))
    second.close()
    assert copied(torch.ones(2, 4)).dtype is BF16


def test_a_module_that_is_added_later_is_asked_too() -> None:
    """A group that would begin mixed precision is refused: at stage 0 gradients are shown in p.grad without it."""
    model, optimizer = built({"*": ALL, "last": KEEP})
    model.last.inner = nn.Linear(4, 4)
    optimizer.add_param_group({"params": list(model.last.inner.parameters())})
    assert (model.last.inner.weight.dtype, model.last.weight.dtype) == (FP32, FP32)
    optimizer.close()
    early = nn.ModuleDict({"early": nn.Linear(4, 4)})
    _, optimizer = built(lambda name, _: ALL if name == "late" else MixedPrecision(None), early, stage=0)
    early["late"] = nn.Linear(4, 4)
    group = {"params": early["late"].parameters()}
    assert "none did when the optimizer was built" in error_of(optimizer.add_param_group, group)
    optimizer.close()


@pytest.mark.parametrize("stage", rows([2], [3]))
def test_an_evaluation_changes_no_buffer(stage: int) -> None:
    """That it changes no weights, masters, states and later steps is a law (`dials.loops`)."""
    model = seeded(0, Stack)
    model.shift.copy_(torch.linspace(0, 1, 4))
    _, optimizer = built(ALL, model, stage=stage)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert_same_bits(model.shift, torch.linspace(0, 1, 4))
    optimizer.close()


class Fed(nn.Module):
    """A model that records its inputs, with a parameter that no optimizer has and two buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.apart = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        self.register_buffer("mean", torch.ones(2))
        self.register_buffer("count", torch.ones((), dtype=torch.int64))
        self.seen: list[Any] = []

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.seen = [x, *args, *kwargs.values()]
        return {"loss": (x * self.weight * self.apart).sum(), "all": (x, [x], 3)}


class Pair(NamedTuple):
    x: Tensor
    name: str


@dataclass
class Item:
    x: Tensor
    count: int = 0


@pytest.mark.parametrize(("stage", "casts"), rows([(0, True), (2, True), (3, False)], [(1, False), (3, True)]))
def test_inputs_outputs_unlisted_parameters_and_asked_for_buffers_are_cast(stage: int, casts: bool) -> None:
    """Inputs and outputs are cast in every container; the caller's own are unchanged."""
    precision = MixedPrecision(BF16, buffer_dtype=BF16 if casts else None, cast_forward_inputs=casts, output_dtype=FP32)
    model = Fed()
    _, optimizer = built(precision, model, [model.weight], stage=stage)
    x, y = torch.ones(2, dtype=FP32 if casts else BF16), torch.ones(2, dtype=FP16)
    containers = (Pair(y, "a"), Item(y, 3), OrderedDict(x=y), UserDict({"x": y}), [y, (y,)])
    found = model(x, *containers, more={"tokens": torch.ones(2, dtype=torch.int64)})
    assert [found["loss"].dtype, found["all"][0].dtype, found["all"][1][0].dtype] == [FP32, FP32, FP32]
    assert found["all"][2] == 3
    found["loss"].backward()
    first, pair, item, ordered, user, listed, more = model.seen
    assert [type(value) for value in model.seen[1:-1]] == [type(value) for value in containers]
    assert (pair.name, item.count) == ("a", 3)
    inside = (pair.x, item.x, ordered["x"], user["x"], listed[0], listed[1][0])
    assert {value.dtype for value in inside} == {BF16 if casts else FP16}
    assert (first.dtype, more["tokens"].dtype, y.dtype) == (BF16, torch.int64, FP16)
    assert (model.weight.dtype, model.apart.dtype) == (BF16, BF16)
    assert (model.mean.dtype, model.count.dtype) == (BF16 if casts else FP32, torch.int64)
    optimizer.step()
    optimizer.close()
    assert model.weight.dtype is BF16
    model(x)
    assert model.seen[0].dtype is x.dtype
