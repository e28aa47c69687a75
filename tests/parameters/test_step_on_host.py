"""Parameters in the host's memory that the class steps there: the bits of the plain loop that steps copies on the CPU.

There is no device here: the CPU takes its place, and each copy to it and from it is made. That the host waits for them
is shown by `test_streams_are_ordered`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import zero
from collectives import Transport, on_threads, solo
from zero import MixedPrecision, Offload, ShardedAverage, ZeroOptimizer, load, save
from zero.core.layout import Dtypes, ParameterSpec
from zero.core.stage import step_device
from zero.runtime.offload import Staging
from zero.state.plain_dicts import completed
from zero.step.classes import UserOptimizers
from zero.step.partition import choose_partitions

from ..contract.space import HABITS
from ..support.errors import error_of
from ..support.limits import BOUND
from ..support.loops import CLASSES, ROOT, SAMPLES, WIDTH, blocks_of, two_layers
from ..support.models import odd_batches, odd_loss
from ..support.narrowed import PRECISIONS
from ..support.plain import assert_same_model
from ..support.programs import Program, check, locked_build
from ..support.rows import without
from . import test_offloaded_parameters as on_host
from .nested_units import ODD
from .test_offloaded_parameters import train

ON_HOST = Offload("cpu", parameters="cpu")
STEPPED_THERE = replace(ON_HOST, step="cpu")

pytestmark = pytest.mark.usefixtures("copied_from_the_host")


def program(ranks: int, optimizer: str, precision: str, habit: str, **others: Any) -> Program:
    numbers = PRECISIONS.get(precision)
    options = {"collective": "pairwise" if ranks > 1 else "auto", "scaled": habit == "scales", **others}
    return Program(ranks, 3, optimizer, offload=STEPPED_THERE, precision=numbers, steps=HABITS[habit], **options)


ROWS = {
    "alone": program(1, "adamw fused", "", "clips"),
    "two in bf16": program(2, "adamw", "bf16", "freezes"),
    "three, scaled": program(3, "adagrad", "fp16", "scales"),
    "two, added up in bf16": program(2, "sgd momentum", "bf16, added up in bf16", "clips"),
    "four, two copies": program(4, "adamw fused", "bf16", "no sync", sharding_factor=2),
    "two by parameter": program(2, "shampoo", "", "zeros"),
    "two in bf16, evaluated": program(2, "schedule-free", "bf16", "freezes"),
    "six": program(6, "adamw", "", "divisors"),
    "alone, kept whole": program(1, "adamw", "bf16", "no sync", reshard=False),
    "five": program(5, "sgd fused", "bf16", "norms", collective="auto"),
    "two, units inside units": program(2, "adamw", "bf16", "norms", units=ODD["inside units"]),
    "two, lent": program(2, "adamw fused", "bf16", "clips", lends=True),
}
IN_CI = ("two by parameter", "two in bf16, evaluated", "six", "alone, kept whole", "five", "two, lent")


@pytest.mark.first(3)
@pytest.mark.parametrize("row", without(ROWS, *IN_CI))
def test_a_step_on_the_host_has_the_bits_of_the_plain_loop(row: str) -> None:
    check(ROWS[row])


def build(transport: Transport, **options: Any) -> tuple[Any, ZeroOptimizer]:
    return on_host.build(transport, **{"offload": STEPPED_THERE, **options})


def sample(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
    return inputs, torch.randint(CLASSES, (SAMPLES,), generator=generator)


@pytest.mark.parametrize(("ranks", "precision"), [(1, None), (2, PRECISIONS["bf16"])])
def test_nothing_that_is_kept_is_on_the_device_and_nothing_is_copied_there_for_a_step(
    ranks: int, precision: MixedPrecision | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged: list[Any] = []
    fetch = Staging.fetch
    monkeypatch.setattr(Staging, "fetch", lambda self, kept: staged.append(kept) or fetch(self, kept))

    def run(transport: Transport) -> None:
        model, optimizer = build(transport, mixed_precision=precision)
        model.last.weight.requires_grad_(False)
        train(model, optimizer, range(2))
        odd_loss(model, odd_batches(1, 0)[0]).backward()
        optimizer.step()
        found = optimizer.describe()
        kinds = ("parameters", "gradients", "optimizer")
        assert all(found.bytes[kind] == found.formula_bytes[kind] for kind in kinds)
        reserved = [tensor for bucket in optimizer._storage.buckets for tensor in bucket.states.kept()]
        held = {tensor.data_ptr() for bucket in optimizer._storage.buckets for tensor in bucket.states.tensors()}
        unused = sum(tensor.nbytes for tensor in reserved if tensor.data_ptr() not in held)
        assert sum(found.bytes[kind] for kind in kinds) == found.offloaded_bytes - unused
        for bucket in optimizer._storage.buckets:
            weights, kept = bucket.states.weights, {tensor.data_ptr() for tensor in bucket.weights.kept()}
            assert bucket.states.master is not None or weights.data_ptr() in kept, "the class steps what is kept"
            assert all(run.parameter.untyped_storage() is weights.untyped_storage() for run in bucket.states.runs)
        optimizer.close()

    [run(solo())] if ranks == 1 else on_threads(ranks, run, timeout=BOUND)
    assert not staged


@pytest.mark.parametrize("before", [STEPPED_THERE, ON_HOST])
def test_a_checkpoint_goes_on_on_the_host_and_on_the_device_and_elsewhere(before: Offload, tmp_path: Path) -> None:
    """And a state dict, of which step counts go where the class expects them."""

    def saved(transport: Transport) -> Any:
        model, optimizer = build(transport, mixed_precision=PRECISIONS["bf16"], offload=before, fused=True)
        train(model, optimizer, range(2))
        save(tmp_path / "saved", optimizer)
        optimizer.consolidate_state_dict(None)
        states = optimizer.state_dict()
        train(model, optimizer, range(2, 4))
        optimizer.close()
        return states, model

    states, expected = on_threads(3, saved, timeout=BOUND)[0]

    def resumed(transport: Transport, **options: Any) -> Any:
        model, optimizer = build(transport, mixed_precision=PRECISIONS["bf16"], fused=True, **options)
        load(tmp_path / "saved", optimizer)
        optimizer.load_state_dict(states)
        train(model, optimizer, range(2, 4))
        optimizer.close()
        return model

    for options in ({}, {"offload": ON_HOST}, {"offload": None, "stage": 1}):
        assert_same_model(resumed(solo(), **options), expected)
    for found in on_threads(2, resumed, timeout=BOUND):
        assert_same_model(found, expected)


def test_the_plain_loop_is_the_one_that_the_contract_writes_out() -> None:
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


# -- the class on the CPU, of parameters on a GPU that is not here -----------------------------------------------------


def spec(*, stepped_on_host: bool) -> ParameterSpec:
    dtypes = Dtypes.all(torch.float32)
    known = {"trainable": True, "group": 0, "index": 0, "offloaded": True, "stepped_on_host": stepped_on_host}
    return ParameterSpec(("weight",), (300, 7), (7, 1), dtypes, "cuda:0", **known)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_a_class_is_tried_where_it_steps(options: dict[str, Any]) -> None:
    """`fused=True` is the kernel of the CPU, and the default is the loop of the CPU."""
    devices: set[str] = set()

    class Noting(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            devices.update(p.device.type for group in self.param_groups for p in group["params"])
            return super().step(closure)

    group: dict[str, Any] = {"lr": 1e-2, **options}
    classes = UserOptimizers(Noting, group)
    options = classes.complete(group)
    (found,), lines, _ = choose_partitions(classes, [options], [spec(stepped_on_host=True)], {0: None})
    assert (devices, lines, found.one_owner, step_device(found)) == ({"cpu"}, [], False, "cpu")
    assert step_device(spec(stepped_on_host=False)) == "cuda:0"


def test_an_older_dict_is_completed_on_the_host() -> None:
    classes = UserOptimizers(torch.optim.AdamW, {"lr": 1e-2, "fused": True})
    options = classes.complete({"lr": 1e-2, "fused": True})
    state = {"step": torch.tensor(3.0), "exp_avg": torch.ones(300, 7), "exp_avg_sq": torch.ones(300, 7)}
    saved = {"state": {0: state}, "param_groups": [{**options, "params": [0]}]}
    del saved["param_groups"][0]["decoupled_weight_decay"]  # type: ignore[attr-defined]
    found = completed(saved, [options], classes, [spec(stepped_on_host=True)])
    assert found["state"][0]["step"].device == torch.device("cpu")


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_what_does_not_go_together_is_refused_in_one_line() -> None:
    assert "step must be 'cpu' or None, not 'host'" in error_of(Offload, "cpu", parameters="cpu", step="host")
    assert 'Offload(parameters="cpu") with stage 2: ' in error_of(build, solo(), stage=2)
    _, optimizer = build(solo())
    assert 'Offload(parameters="cpu") with a ShardedAverage: ' in error_of(ShardedAverage, optimizer)


def test_ranks_that_step_in_different_places_learn_of_it() -> None:
    def program(transport: Transport) -> str:
        return error_of(build, transport, offload=(STEPPED_THERE, ON_HOST)[transport.rank])

    for text in on_threads(2, program, timeout=BOUND):
        assert "states and parameters in the host's memory, stepped there, but rank 1 for" in text


def test_gradients_in_the_hosts_memory_are_those_that_the_class_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Tensor] = []

    class Noting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            given.extend(p.grad for group in self.param_groups for p in group["params"] if p.grad is not None)
            return super().step(closure)

    model = locked_build(0)
    optimizer = ZeroOptimizer(model, Noting, stage=3, offload=STEPPED_THERE, process_group=solo(), lr=0.1)
    given.clear()
    odd_loss(model, odd_batches(1, 0)[0]).backward()
    optimizer.step()
    homes = {tensor.untyped_storage().data_ptr() for b in optimizer._storage.buckets for tensor in b.grad.tensors()}
    assert given
    assert {gradient.untyped_storage().data_ptr() for gradient in given} <= homes
    optimizer.close()
