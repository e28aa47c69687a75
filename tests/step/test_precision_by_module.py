"""Mixed precision by module: who has which dtype, what is cast at a border, and what is refused."""

from __future__ import annotations

import copy
import gc
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from collectives import Transport, on_threads, solo
from zero import MixedPrecision, ZeroOptimizer

from ..support.by_module import KEEP
from ..support.errors import error_of
from ..support.loops import seeded
from ..support.narrowed import BF16, FP16, FP32
from ..support.plain import assert_same_bits
from ..support.rows import rows

ALL = MixedPrecision(BF16)


class Seen(nn.Linear):
    """A layer that takes any input, and records the dtypes of what it gets."""

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        self.seen = [x.dtype, None if extra is None else extra.dtype]
        return super().forward(x.to(self.weight.dtype))


class Stack(nn.Module):
    """Layers in a list and by name; the last two share a module, and the first is tied to one of the list."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Seen(4, 4)
        self.layers = nn.ModuleList([Seen(4, 4), nn.Sequential(Seen(4, 4), Seen(4, 4))])
        self.last = Seen(4, 4)
        self.register_buffer("shift", torch.ones(4))
        self.layers[1].register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x, extra=self.shift)
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.last(x)
        return found


def built(precision: Any, model: nn.Module | None = None, **arguments: Any) -> tuple[Any, ZeroOptimizer]:
    model = seeded(0, Stack) if model is None else model
    given = {"stage": 1, "process_group": solo(), "module": model, **arguments}
    return model, ZeroOptimizer(model, torch.optim.SGD, lr=0.1, mixed_precision=precision, **given)


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name.removesuffix(".weight"): p.dtype for name, p in model.named_parameters() if name.endswith("weight")}


@pytest.mark.parametrize("stage", [1, 3])
def test_the_last_pattern_that_matches_a_module_or_one_around_it_decides(stage: int) -> None:
    wide = MixedPrecision(FP16, buffer_dtype=FP16, output_dtype=BF16)
    model, optimizer = built({"*": ALL, "first": KEEP, "layers.1": wide, "layers.?.1": KEEP}, stage=stage)
    expected = {"first": FP32, "layers.0": BF16, "layers.1.0": FP16, "layers.1.1": FP32, "last": BF16}
    assert dtypes(model) == expected
    assert (model.shift.dtype, model.layers[1].scale.dtype) == (FP32, FP16)
    assert {bucket.dtype for bucket in optimizer.describe().buckets} == {str(dtype) for dtype in expected.values()}
    assert model(torch.ones(2, 4)).dtype is BF16
    parts = [model.first, model.layers[0], *model.layers[1], model.last]
    assert [part.seen for part in parts] == [[FP32, FP32], [BF16, None], [FP16, None], [FP32, None], [BF16, None]]
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
    assert model.first.seen == [FP32, FP32]
    optimizer.close()


@pytest.mark.parametrize("stage", [2, 3])
def test_a_parameter_that_is_not_updated_has_the_dtype_of_its_module(stage: int) -> None:
    model = seeded(0, Stack)
    listed = list(model.layers.parameters())
    optimizer = ZeroOptimizer(
        listed,
        torch.optim.SGD,
        module=model,
        stage=stage,
        process_group=solo(),
        mixed_precision={"*": ALL, "first": KEEP, "layers.0": KEEP},
    )
    assert [p.dtype for p in (model.first.weight, model.layers[0].weight, model.last.weight)] == [FP32, FP32, BF16]
    assert model(torch.ones(2, 4)).dtype is BF16
    optimizer.close()


class Each(nn.Linear):
    """A layer that takes any input, and records the dtype of each call."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.dtype)
        return super().forward(x.to(self.weight.dtype))


class Chain(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("held", ["module", "container"])
def test_a_module_that_two_hold_is_a_border_for_the_one_that_differs(held: str) -> None:
    """Also if what two hold is a container without a forward. The name that was registered first counts."""
    shared, entering = Each(), list[torch.dtype]()
    both = nn.ModuleList([shared])

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Sequential(shared) if held == "module" else Chain(both) for _ in range(2))

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


def test_a_group_that_would_begin_mixed_precision_is_refused() -> None:
    """At stage 0 gradients are shown in p.grad without it, and would be those of the other parameters alone."""
    model = nn.ModuleDict({"early": nn.Linear(4, 4)})
    _, optimizer = built(lambda name, _: ALL if name == "late" else MixedPrecision(None), model, stage=0)
    model["late"] = nn.Linear(4, 4)
    assert "none did when the optimizer was built" in error_of(
        optimizer.add_param_group, {"params": model["late"].parameters()}
    )
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


def test_the_outputs_of_a_whole_model_are_cast_in_every_container() -> None:
    class Outputs(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return {"y": super().forward(x), "all": (x, [x], 3), "count": torch.ones(1, dtype=torch.int64)}

    model, optimizer = built(MixedPrecision(BF16, output_dtype=FP32), Outputs(4, 4))
    found = model(torch.ones(2, 4))
    assert [found["y"].dtype, found["all"][0].dtype, found["all"][1][0].dtype] == [FP32, FP32, FP32]
    assert (found["all"][2], found["count"].dtype) == (3, torch.int64)
    optimizer.close()


def test_parameters_that_keep_their_dtypes_show_their_means() -> None:
    """As without mixed precision: there are no master weights."""
    model, optimizer = built(MixedPrecisionPolicy(output_dtype=BF16), stage=0)
    found = model(torch.ones(2, 4))
    found.sum().backward()
    assert (found.dtype, model.first.weight.grad.dtype) == (BF16, FP32)
    optimizer.close()


def test_a_module_that_is_added_later_is_asked_too() -> None:
    model = seeded(0, Stack)
    _, optimizer = built({"*": ALL, "last": KEEP}, model, module=model)
    model.last.inner = nn.Linear(4, 4)
    optimizer.add_param_group({"params": list(model.last.inner.parameters())})
    assert (model.last.inner.weight.dtype, model.last.weight.dtype) == (FP32, FP32)
    optimizer.close()


def facts_of(model: nn.Module) -> Any:
    hooks = [(len(part._forward_pre_hooks), len(part._forward_hooks)) for part in model.modules()]
    return hooks, [tensor.dtype for tensor in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize("problem", ["raises", "differs", "raises alone"])
@pytest.mark.parametrize("stage", rows([1, 3], [0, 2]))
def test_a_group_that_cannot_be_added_changes_nothing(stage: int, problem: str) -> None:
    """A user's function raises, or each rank has an answer and they differ."""
    ranks = 1 if problem == "raises alone" else 2 + (stage == 1)

    def program(transport: Transport, fails: bool) -> list[Tensor]:
        model, answers = seeded(0, Stack), dict[str, Any](first=KEEP, last=KEEP)
        model.last.register_buffer("kept", torch.ones(4))

        def of(name: str, module: nn.Module) -> Any:
            return answers.get(name, MixedPrecision(BF16, buffer_dtype=BF16))

        listed = [*model.first.parameters(), *model.layers[1][0].parameters()]
        given = {"module": model, "stage": stage, "process_group": transport, "lr": 0.1, "momentum": 0.9}
        optimizer = ZeroOptimizer(listed, torch.optim.SGD, mixed_precision=of, **given)
        before = facts_of(model)
        model.last.kept.fill_(transport.rank)  # each rank has its own, as of a batch norm
        if fails:
            answers["first"] = answers["last"] = ALL
            if transport.rank == ranks - 1:
                answers["layers.0"] = KEEP if problem == "differs" else None
            with pytest.raises((TypeError, ValueError), match=r"layers\.0"):
                optimizer.add_param_group({"params": list(model.layers[0].parameters())})
            answers = {"first": KEEP, "last": KEEP}
        assert facts_of(model) == before
        assert model.last.kept.tolist() == 4 * [transport.rank]
        for step in range(2):
            model(torch.full((2, 4), 0.5 + step + transport.rank)).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        return list(model.parameters())

    for ours, other in zip(*(on_threads(ranks, partial(program, fails=each)) for each in (True, False)), strict=True):
        for mine, theirs in zip(ours, other, strict=True):
            assert_same_bits(mine, theirs)


def test_ranks_whose_borders_differ_learn_the_first_one() -> None:
    def program(transport: Transport) -> str:
        cast = BF16 if transport.rank else FP16
        options = {"*": ALL, "last": MixedPrecision(FP32, output_dtype=cast)}
        return str(error_of(built, options, process_group=transport))

    for said in on_threads(2, program):
        assert re.search(r"rank 0 has \[precision of 'last': .*float16.*\] where rank 1 has \[.*bfloat16", said), said


def tied() -> nn.Module:
    model = seeded(0, Stack)
    model.last.weight = model.first.weight
    return model


REFUSED: dict[str, tuple[Any, Any, type[Exception], str]] = {  # what is given; a model
    "a class": (MixedPrecision, None, TypeError, "mixed_precision must be a zero.MixedPrecision, not <class"),
    "no pattern": ({3: ALL}, None, TypeError, "mixed_precision: a pattern must be a name of modules, not 3"),
    "no precision": (
        {"*": BF16},
        None,
        TypeError,
        r"mixed_precision\['\*'\] must be a zero.MixedPrecision, not torch.bf",
    ),
    "None": (
        lambda name, _: None if name else ALL,
        None,
        TypeError,
        r"mixed_precision returned None for 'first': return .*MixedPrecision\(torch.float32\) keeps fp32",
    ),
    "nothing": (
        lambda *_: 3,
        None,
        TypeError,
        "what mixed_precision returns for the outermost module must be a zero.M",
    ),
    "unmatched": ({"first": KEEP}, None, ValueError, r"no pattern matches the outermost module: put '\*' first"),
    "unused": ({"*": ALL, "norm": KEEP}, None, ValueError, "the pattern 'norm' decides about no module: correct it"),
    "hidden": (
        {"first": KEEP, "*": ALL},
        None,
        ValueError,
        "the pattern 'first' decides about no module: .*or move it",
    ),
    "tied": (
        {"*": ALL, "last": KEEP},
        tied,
        ValueError,
        "'first.weight' and 'last.weight' are one parameter, but .*bfloa",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_in_one_line(name: str) -> None:
    given, model, kind, said = REFUSED[name]
    model = seeded(0, Stack) if model is None else model()
    with pytest.raises(kind, match=said) as caught:
        built(given, model)
    assert "\n" not in str(caught.value)
    model(torch.ones(2, 4))  # it is plain


def test_what_a_dtype_or_a_policy_cannot_be() -> None:
    with pytest.raises(ValueError, match="reduce_dtype and accumulate_dtype need a param_dtype"):
        built(MixedPrecisionPolicy(reduce_dtype=FP32))
    with pytest.raises(TypeError, match="output_dtype must be one of"):
        MixedPrecision(BF16, output_dtype=torch.float64)
    with pytest.raises(TypeError, match="param_dtype must be one of"):
        built(MixedPrecisionPolicy(torch.float64))
    model = nn.Linear(2, 2)
    with pytest.raises(
        ValueError, match=r"mixed_precision= by patterns or by a function without a module: it needs .*: pass the mod"
    ):
        ZeroOptimizer(model.parameters(), mixed_precision={"*": ALL}, process_group=solo())
