"""A class that is refused, in a param group on several devices: the error says how to name a loop of torch.

There is no GPU here: the trial of the class is taken to fail.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zero.core.layout import Dtypes, ParameterSpec
from zero.step.classes import UserOptimizers
from zero.step.partition import check_classes, choose_partitions
from zero.step.trial import Trial

from ..support.shampoo import Shampoo


def refusal(cls: type[torch.optim.Optimizer], devices: tuple[str, ...], monkeypatch: Any, **options: Any) -> str:
    """Return the error about parameters on these devices, in the second of two groups, of a class that fails."""

    def fails(*_: Any) -> Any:
        raise ValueError("other bits")

    user_optimizers = UserOptimizers(cls, {})
    groups = [user_optimizers.complete(given) for given in ({}, options)]
    dtypes = Dtypes.all(torch.float32)
    specs = [
        ParameterSpec((f"p{number}",), (2,), (1,), dtypes, device, True, 1, number)
        for number, device in enumerate(devices)
    ]
    monkeypatch.setattr(Trial, "run", fails)
    with pytest.raises(ValueError, match=r"^other bits") as chosen:
        choose_partitions(user_optimizers, groups, specs, {1: None})
    with pytest.raises(ValueError, match=r"^other bits") as checked:
        check_classes(user_optimizers, groups, specs)
    assert str(chosen.value) == str(checked.value)
    return str(chosen.value)


@pytest.mark.parametrize(("cls", "more"), [(torch.optim.AdamW, ", or fused=True"), (torch.optim.RMSprop, "")])
def test_a_group_on_the_cpu_and_a_gpu_that_is_refused_is_told_to_name_a_loop(
    cls: type[torch.optim.Optimizer], more: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's default depends on all parameters of a group; a rank steps those of one device."""
    assert refusal(cls, ("cpu", "cuda:0"), monkeypatch) == (
        "other bits. Param group 1 is on cpu and cuda:0, where torch's default loop depends on all its parameters "
        f"together: name a loop, foreach=False (the default there) or foreach=True{more}"
    )


@pytest.mark.parametrize(
    ("cls", "devices", "options"),
    [
        (torch.optim.AdamW, ("cpu", "cuda:0"), {"foreach": False}),
        (torch.optim.AdamW, ("cpu", "cuda:0"), {"fused": False}),
        (torch.optim.AdamW, ("cuda:0", "cuda:1"), {}),
        (torch.optim.AdamW, ("cpu",), {}),
        (Shampoo, ("cpu", "cuda:0"), {}),
    ],
)
def test_another_that_is_refused_is_not(
    cls: type[torch.optim.Optimizer],
    devices: tuple[str, ...],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert refusal(cls, devices, monkeypatch, **options) == "other bits"
