"""Parameters in the host's memory, and their step there: what is copied, where a class steps, the contract's loop.

There is no device here: the CPU takes its place, and each copy to it and from it is made. That copies are ordered on
streams is shown by `test_streams_are_ordered`; bits, bytes and refusals are laws (`tests/dials/places.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import zero
from collectives import Transport, on_threads, solo
from zero import MixedPrecision, Offload, ZeroOptimizer
from zero.core.grain import BY_ELEMENT
from zero.core.layout import Dtypes, ParameterSpec
from zero.core.stage import step_device
from zero.runtime.offload import Staging
from zero.state.plain_dicts import completed
from zero.step.classes import UserOptimizers
from zero.step.partition import choose_partitions

from ..support.limits import BOUND
from ..support.loops import CLASSES, ROOT, SAMPLES, WIDTH, blocks_of, two_layers
from ..support.models import build as locked_build
from ..support.models import odd_batches, odd_loss
from ..support.narrowed import PRECISIONS
from ..support.parts import parts_of
from ..support.plain import assert_same_model

ON_HOST = Offload("cpu", parameters="cpu")
STEPPED_THERE = replace(ON_HOST, step="cpu")

pytestmark = pytest.mark.usefixtures("copied_from_the_host")


@pytest.mark.parametrize("offload", [ON_HOST, STEPPED_THERE])
@pytest.mark.parametrize(("ranks", "precision"), [(1, None), (2, PRECISIONS["bf16"])])
def test_a_shard_stays_on_the_host_and_is_copied_for_a_step_on_the_device(
    ranks: int, precision: MixedPrecision | None, offload: Offload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the class steps on the host, nothing is copied for the step."""
    staged, fetch = list[int](), Staging.fetch
    monkeypatch.setattr(Staging, "fetch", lambda self, kept: staged.append(len(kept)) or fetch(self, kept))

    def run(transport: Transport) -> None:
        model = locked_build(0)
        given: dict[str, Any] = {"stage": 3, "offload": offload, "bucket_cap_mb": 0.0005, "mixed_precision": precision}
        given |= {"collective": "pairwise"} if ranks > 1 else {}
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, process_group=transport, lr=1e-2, **given)
        model.last.weight.requires_grad_(False)
        for step in range(2):
            optimizer.zero_grad()
            odd_loss(model, odd_batches(1, step)[0]).backward()
            optimizer.step()
        found = optimizer.describe()
        held = sum(found.bytes[kind] for kind in ("parameters", "gradients", "optimizer"))
        counts = 4 * len(list(model.parameters())) if offload.step is None else 0
        assert held - found.offloaded_bytes <= counts, "step counts alone are on the device"
        assert all(buffer.shard.numel() == 0 for buffer in parts_of(optimizer).storage.manager.buffers())
        optimizer.close()

    [run(solo())] if ranks == 1 else on_threads(ranks, run, timeout=BOUND)
    assert (max(staged, default=0) == 3) is (offload.step is None)


def test_the_plain_loop_is_the_one_that_the_contract_writes_out() -> None:
    def sample(seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
        return inputs, torch.randint(CLASSES, (SAMPLES,), generator=generator)

    names: dict[str, Any] = {"zero": zero, "torch": torch}
    page = (ROOT / "zero" / "contract" / "plain-loop.md").read_text()
    exec(blocks_of(page)["The step on the host"], names)
    (model, plain), steps = (two_layers() for _ in range(2)), [[sample(n) for n in (2 * s, 2 * s + 1)] for s in (0, 1)]
    plain.load_state_dict(model.state_dict())
    options: dict[str, Any] = {"lr": 1e-2, "fused": True}
    optimizer = ZeroOptimizer(
        model, torch.optim.AdamW, stage=3, offload=STEPPED_THERE, process_group=solo(), divisor=2, **options
    )
    copies = [p.detach().to("cpu", copy=True).requires_grad_() for p in plain.parameters()]
    inner = torch.optim.AdamW(copies, **options)
    for batches in steps:
        names["train"](plain, copies, cross_entropy, batches, inner, 0.1)
        for inputs, targets in batches:
            cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    assert_same_model(model, plain)


def spec(*, stepped_on_host: bool) -> ParameterSpec:
    dtypes = Dtypes.all(torch.float32)
    known = {"trainable": True, "group": 0, "index": 0, "offloaded": True, "stepped_on_host": stepped_on_host}
    return ParameterSpec(("weight",), (300, 7), (7, 1), dtypes, "cuda:0", **known)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_a_class_is_tried_where_it_steps_and_an_older_dict_is_completed_there(options: dict[str, Any]) -> None:
    """`fused=True` is the kernel of the CPU, and the default is the loop of the CPU."""
    devices: set[str] = set()

    class Tried(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            devices.update(p.device.type for group in self.param_groups for p in group["params"])
            return super().step(closure)

    classes = UserOptimizers(Tried, {"lr": 1e-2, **options})
    complete = classes.complete({"lr": 1e-2, **options})
    (found,), lines, _ = choose_partitions(classes, [complete], [spec(stepped_on_host=True)], {0: None})
    assert (devices, lines, found.grain, step_device(found)) == ({"cpu"}, [], BY_ELEMENT, "cpu")
    assert step_device(spec(stepped_on_host=False)) == "cuda:0"
    state = {"step": torch.tensor(3.0), "exp_avg": torch.ones(300, 7), "exp_avg_sq": torch.ones(300, 7)}
    older = {name: value for name, value in complete.items() if name != "decoupled_weight_decay"}
    saved = {"state": {0: state}, "param_groups": [{**older, "params": [0]}]}
    dict_of_now = completed(saved, [complete], classes, [spec(stepped_on_host=True)])
    assert dict_of_now["state"][0]["step"].device == torch.device("cpu")
