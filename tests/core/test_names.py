"""Names are those of the model without torch's wrappers, everywhere, and names with wrappers are understood."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from collectives import solo
from zero import ZeroOptimizer
from zero.core.parameter_specs import (
    all_without_wrappers,
    by_known_name,
    named_buffers,
    named_parameters,
    named_parts,
    named_tensors,
    remark_on_prefix,
)

from ..support.models import build


def net() -> Any:
    model: Any = build()
    model.layers[1].register_buffer("kept", torch.arange(3.0))
    return model


def compiled(module: nn.Module) -> Any:
    made: Any = torch.compiler.disable(module)  # type: ignore[no-untyped-call]
    return made


def with_blocks(wrap: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    def wrapped(model: Any) -> Any:
        model.layers = nn.ModuleList([wrap(block) for block in model.layers])
        return model

    return wrapped


WRAPPED: dict[str, Callable[[nn.Module], Any]] = {
    "torch.compile(model)": compiled,
    "torch.compile(block)": with_blocks(compiled),
    "both": lambda model: compiled(with_blocks(compiled)(model)),
    "checkpoint_wrapper(block)": with_blocks(checkpoint_wrapper),
    "torch.compile(checkpoint_wrapper(block))": with_blocks(lambda block: compiled(checkpoint_wrapper(block))),
}


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_a_wrapped_model_has_the_names_of_the_plain_one(wrapper: str) -> None:
    plain, wrapped = net(), WRAPPED[wrapper](net())
    assert [name for name, _ in named_parameters(wrapped)] == [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in named_buffers(wrapped)] == [name for name, _ in plain.named_buffers()]
    twice = [*plain.named_parameters(remove_duplicate=False), *plain.named_buffers(remove_duplicate=False)]
    assert [name for name, _ in named_tensors(wrapped)] == [name for name, _ in twice]
    assert list(dict.fromkeys(name for name, _ in named_parts(wrapped))) == [name for name, _ in plain.named_modules()]
    saved = ZeroOptimizer(wrapped, process_group=solo()).state_dict()["param_groups"][0]["param_names"]
    assert saved == [name for name, _ in plain.named_parameters()]
    own = nn.Module()  # of the user, which keeps another one under the name that torch's wrapper uses
    own._orig_mod = WRAPPED[wrapper](net())
    assert [name for name, _ in named_parameters(own)] == [f"_orig_mod.{name}" for name, _ in plain.named_parameters()]


def test_a_name_with_wrappers_is_the_models_unless_it_has_both() -> None:
    found = by_known_name({"_orig_mod.a": 1, "b._checkpoint_wrapped_module._orig_mod.c": 2, "d": 3}, {"a", "b.c", "d"})
    assert found == {"a": 1, "b.c": 2, "d": 3}
    assert by_known_name({"_orig_mod.a": 1}, {"_orig_mod.a", "a"}) == {"_orig_mod.a": 1}
    assert by_known_name({"_orig_mod.a": 1, "a": 2}, {"a"}) == {"_orig_mod.a": 1, "a": 2}
    assert by_known_name({"_orig_mod.a": 1}, {"b"}) == {"_orig_mod.a": 1}
    assert all_without_wrappers(["_orig_mod.a", "_orig_mod.b"]) == ["a", "b"]
    assert all_without_wrappers(["_orig_mod.a", "a"]) == ["_orig_mod.a", "a"]
    assert all_without_wrappers(["_orig_mod"]) == ["_orig_mod"]


def test_the_prefix_of_ddp_is_named_if_it_explains_all_names() -> None:
    assert "begin with 'module.'" in remark_on_prefix(["module.a", "_orig_mod.module.b"], {"a", "b", "c"})
    for names, known in ((["module.a", "b"], {"a", "b"}), (["module.a"], {"c"}), ([], {"a"})):
        assert remark_on_prefix(names, known) == ""
    optimizer = ZeroOptimizer(net(), process_group=solo())
    saved = optimizer.state_dict()
    group = saved["param_groups"][0]
    group["param_names"] = [f"module.{name}" for name in group["param_names"]]
    with pytest.raises(ValueError, match=r"belongs to another model.*begin with 'module\.', which Distributed"):
        optimizer.load_state_dict(saved)
