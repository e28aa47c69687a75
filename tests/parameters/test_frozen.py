"""Frozen parameters that have no place in a layout stay whole on every rank; trained ones are refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor

from collectives import Transport, on_threads
from zero import MixedPrecision, ZeroOptimizer, verify

from ..support.loops import PlainLoop, seeded
from ..support.plain import assert_same_bits, assert_same_model, assert_same_states, share
from ..support.pool import GlooPool
from ..support.quantised import KINDS, WIDTH, Packed, QLora, Quantised, Tagged, assert_same_qlora, inside, qlora

pytestmark = pytest.mark.contract

ALL_STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
STAGES = pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1)), 2, 3])
BF16 = MixedPrecision(torch.bfloat16)
PRECISIONS = pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])
COPIED = ("int8", "uint8", "fp8", "complex")
BATCHES = [
    (torch.randn(4, WIDTH, generator=g), torch.randn(4, 3, generator=g))
    for g in map(torch.Generator().manual_seed, range(8))
]


def computing_in(precision: MixedPrecision | None) -> torch.dtype:
    return torch.float32 if precision is None else precision.param_dtype


def zero(given: Any, group: Any, stage: int, **more: Any) -> ZeroOptimizer:
    return ZeroOptimizer(
        given, torch.optim.AdamW, stage=stage, process_group=group, bucket_cap_mb=0.0005, lr=1e-2, **more
    )


def train(model: nn.Module, optimizer: ZeroOptimizer, begin: int = 0, end: int = len(BATCHES)) -> None:
    for inputs, targets in share(BATCHES[begin:end], optimizer.rank, optimizer.world_size):
        nn.functional.mse_loss(model(inputs).float(), targets).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()


def plain(precision: MixedPrecision | None = None, model: nn.Module | None = None) -> nn.Module:
    model = model or qlora(dtype=computing_in(precision))
    PlainLoop(precision=precision).run(model, BATCHES)
    return model


def error_of(call: Callable[..., Any], *arguments: Any, **more: Any) -> str:
    try:
        call(*arguments, **more)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# -- QLoRA ---------------------------------------------------------------------------------------------------------


def qlora_on_a_rank(group: Any, stage: int, precision: MixedPrecision | None, rank: int) -> tuple[QLora, str]:
    """Return a rank's model after training.

    Parameters that rank 0 can broadcast begin with other values on each rank.
    """
    model = qlora(dtype=computing_in(precision))
    if rank:
        with torch.no_grad():
            for name in COPIED:
                weight = model.blocks[list(KINDS).index(name)].weight
                weight.copy_(weight.flip(0))
    optimizer = zero(model, group, stage, mixed_precision=precision)
    train(model, optimizer)
    told = optimizer.check_replicas()
    optimizer.close()
    return model, told


@PRECISIONS
@ALL_STAGES
@pytest.mark.by_default("2-bf16", "3-fp32")
def test_a_quantised_base_with_adapters_trains_the_plain_loops_bits(
    stage: int, precision: MixedPrecision | None
) -> None:
    results = on_threads(2, lambda group: qlora_on_a_rank(group, stage, precision, group.rank), timeout=10)
    expected = plain(precision)
    for model, told in results:
        assert_same_qlora(model, expected)
        assert told == results[0][1]


def real_rank(group: dist.ProcessGroup, rank: int, stage: int, precision: MixedPrecision | None) -> bool:
    model, _ = qlora_on_a_rank(group, stage, precision, rank)
    assert_same_qlora(model, plain(precision))
    return True


@PRECISIONS
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.by_default("2-fp32")
def test_a_quantised_base_trains_on_real_processes(
    gloo: GlooPool, stage: int, precision: MixedPrecision | None
) -> None:
    assert gloo.run(real_rank, stage, precision) == [True, True]


@pytest.mark.parametrize("listed", [True, False])
@STAGES
def test_what_is_replicated_is_the_ranks_own_memory_and_described(stage: int, listed: bool) -> None:
    def program(group: Transport) -> None:
        model = qlora(dtype=torch.bfloat16)
        before = {name: [part.data_ptr() for part in inside(p)] for name, p in model.bases().items()}
        given: Any = model if listed else [p for p in model.parameters() if p.requires_grad]
        optimizer = zero(given, group, stage, module=model, mixed_precision=BF16)
        train(model, optimizer)
        described = optimizer.describe()
        assert described.replicated_bytes == {
            name: sum(part.nbytes for part in inside(p)) for name, p in model.bases().items()
        }
        assert f"replicated     {sum(described.replicated_bytes.values()):>14,}  blocks.0.weight" in str(described)
        assert not {name for bucket in described.buckets for name in bucket.names} & set(model.bases())
        resolved = {name: [part.data_ptr() for part in inside(p)] for name, p in model.bases().items()}
        del before["blocks.3.weight"], resolved["blocks.3.weight"]  # resolving a conjugate allocates new memory
        assert resolved == before
        optimizer.close()

    on_threads(2, program, timeout=10)


def verified_batches() -> list[tuple[Tensor, Tensor]]:
    return BATCHES


def qlora_in_bf16() -> QLora:
    return qlora(dtype=torch.bfloat16)


def verified_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]).float(), batch[1])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "precision", [pytest.param(None, id="fp32"), pytest.param(BF16, id="bf16", marks=pytest.mark.long)]
)
def test_verify_takes_a_quantised_base(precision: MixedPrecision | None) -> None:
    found = verify(
        build_model=qlora if precision is None else qlora_in_bf16,
        batches=verified_batches,
        loss_fn=verified_loss,
        optimizer_class=torch.optim.AdamW,
        lr=1e-2,
        max_norm=1.0,
        stages=(1, 3),
        world_sizes=(2,),
        mixed_precision=precision,
    )
    assert found.ok


# -- differences between ranks ---------------------------------------------------------------------------------------


def differing(model: QLora) -> None:
    """Give a rank wrapped and packed weights of its own."""
    bases: Any = model.bases()
    bases["blocks.4.weight"].scale.mul_(2)
    bases["blocks.5.weight"].detach().view(torch.int8)[0, 0] += 1


@pytest.mark.parametrize("listed", [True, False])
@STAGES
@pytest.mark.by_default("2-True")
def test_subclasses_that_differ_are_an_error_that_names_them_and_nothing_has_changed(stage: int, listed: bool) -> None:
    def program(group: Transport) -> tuple[str, nn.Module]:
        model = qlora()
        if group.rank == 1:
            differing(model)
        given: Any = model if listed else [p for p in model.parameters() if p.requires_grad]
        told = error_of(zero, given, group, stage, module=model)
        reference = qlora()
        if group.rank == 1:
            differing(reference)
        assert_same_qlora(model, reference)
        model = qlora()
        optimizer = zero(model, group, stage)
        train(model, optimizer)
        optimizer.close()
        return told, model

    for told, model in on_threads(2, program, timeout=10):
        assert "ValueError: not the same on every rank: 'blocks.4.weight', 'blocks.5.weight'" in told
        assert "between rank 0 and rank 1" in told
        assert "Packed or Quantised is not copied from rank 0: load or quantise the same weights on every rank" in told
        assert_same_qlora(model, plain())


class Facts(Quantised):
    """A wrapper that keeps its scale as a number."""

    times: float

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["whole", "scale"], {"times": self.times, "object": object()}

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(found, cls):
            found.times = args[0].times
        return found


class Own(Tensor):
    """A subclass with ordinary memory and a ``__torch_dispatch__`` of its own."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._DisableTorchDispatch():
            found = func(*args, **(kwargs or {}))
        return found.as_subclass(cls) if func is torch.ops.aten.detach.default else found


def facts(number: float) -> Tensor:
    made = Facts(torch.ones(2, dtype=torch.int8), torch.ones(2))
    made.times = number
    return made


class Unnamed(Tensor):
    """A Python subclass of a tensor that is not a parameter."""


MADE: dict[str, Callable[[float], Tensor]] = {
    "wrapper": lambda number: TwoTensor(torch.ones(3), torch.full((3,), number)),
    "nested": lambda number: TwoTensor(
        TwoTensor(torch.ones(3), torch.ones(3)), TwoTensor(torch.ones(3), torch.full((3,), number))
    ),
    "facts": facts,
    "own": lambda number: torch.full((5,), number)[2:].as_subclass(Own),
    "packed": lambda number: Packed(torch.full((3,), number), requires_grad=False),
}


class Holder(nn.Module):
    """A trained layer beside a frozen tensor."""

    def __init__(self, held: Tensor, *, as_buffer: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3)
        if as_buffer:
            self.register_buffer("held", held)
        else:
            self.held = held if isinstance(held, nn.Parameter) else nn.Parameter(held, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        return found


def holder(held: Tensor, *, as_buffer: bool = False) -> Holder:
    made = seeded(0, lambda: Holder(held, as_buffer=as_buffer))
    assert isinstance(made, Holder)
    return made


@pytest.mark.parametrize("as_buffer", [False, True])
@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.by_default("2-packed-False", "3-wrapper-True")
def test_whatever_says_what_it_holds_is_compared(stage: int, kind: str, as_buffer: bool) -> None:
    def program(group: Transport, differs: bool) -> str:
        held = MADE[kind](1.0 + differs * group.rank)
        model = holder(held.as_subclass(Unnamed) if as_buffer and kind == "packed" else held, as_buffer=as_buffer)
        return error_of(zero, model, group, stage)

    assert on_threads(2, lambda group: program(group, False), timeout=10) == ["nothing"] * 2
    for told in on_threads(2, lambda group: program(group, True), timeout=10):
        assert "not the same on every rank: 'held' (first between rank 0 and rank 1)" in told


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_whose_replicated_parameters_are_of_other_kinds_are_told(stage: int) -> None:
    def program(group: Transport) -> str:
        model = holder(torch.ones(3, dtype=torch.uint8 if group.rank else torch.int8))
        return error_of(zero, model.layer.parameters(), group, stage, module=model)

    for told in on_threads(2, program, timeout=10):
        assert "[replicated held [3] torch.int8 Parameter] where rank 1 has [replicated held [3] torch.uint8" in told


# -- trained ---------------------------------------------------------------------------------------------------------


TRAINED: dict[str, tuple[Callable[[], Tensor], str]] = {
    "wrapper": (
        lambda: nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3))),
        "'held' is a TwoTensor, a tensor subclass with a __torch_dispatch__ of its own",
    ),
    "own": (lambda: nn.Parameter(torch.ones(3).as_subclass(Own)), "'held' is a Own, a tensor subclass"),
    "complex": (
        lambda: nn.Parameter(torch.ones(3, dtype=torch.complex64)),
        "'held' is torch.complex64, and only real parameters are trained: keep its real view, "
        "nn.Parameter(torch.view_as_real(z))",
    ),
    "fp8": (lambda: nn.Parameter(torch.ones(3).to(torch.float8_e5m2)), "'held' is torch.float8_e5m2: train one of"),
}


@pytest.mark.parametrize("kind", TRAINED)
@STAGES
@pytest.mark.by_default("2-wrapper", "3-fp8")
def test_what_cannot_be_trained_is_named_on_every_rank_with_a_remedy(stage: int, kind: str) -> None:
    make, expected = TRAINED[kind]

    def program(group: Transport) -> tuple[str, nn.Module]:
        model = holder(make() if group.rank else nn.Parameter(torch.ones(3)))
        model.other = make() if group.rank else nn.Parameter(torch.ones(3))
        told = error_of(zero, model, group, stage)
        model.held.requires_grad_(False)  # as the error says
        del model.other
        model.held = nn.Parameter(torch.ones(3), requires_grad=False)
        optimizer = zero(model, group, stage)
        train(model, optimizer)
        optimizer.close()
        return told, model

    for told, model in on_threads(2, program, timeout=10):
        assert expected in told
        assert "freeze it with requires_grad_(False) before the optimizer is built" in told
        assert "share memory" not in told
        assert_same_model(model, plain(model=holder(torch.ones(3))))


@STAGES
def test_a_group_with_a_subclass_is_refused_and_training_goes_on(stage: int) -> None:
    def program(group: Transport) -> tuple[str, nn.Module]:
        model = holder(torch.ones(3))
        optimizer = zero(model, group, stage)
        told = error_of(optimizer.add_param_group, {"params": [TRAINED["wrapper"][0]()]})
        train(model, optimizer)
        optimizer.close()
        return told, model

    for told, model in on_threads(2, program, timeout=10):
        assert "TypeError: 'parameter 3' is a TwoTensor, a tensor subclass" in told
        assert_same_model(model, plain(model=holder(torch.ones(3))))


def distributed_tensor(group: dist.ProcessGroup, rank: int, trained: bool) -> str:
    mesh = dist.DeviceMesh.from_group(group, "cpu")
    held = DTensor.from_local(torch.full((3,), 1.0 + rank), mesh, [Shard(0)], run_check=False)
    model = holder(nn.Parameter(held, requires_grad=trained))
    return error_of(zero, model, group, 2)


def test_a_distributed_tensor_is_named_whether_it_is_trained_or_differs(gloo: GlooPool) -> None:
    for told in gloo.run(distributed_tensor, True):
        assert "'held' is a DTensor, a tensor subclass with a __torch_dispatch__ of its own" in told
    for told in gloo.run(distributed_tensor, False):
        assert "not the same on every rank: 'held' (first between rank 0 and rank 1)" in told


def tagged() -> nn.Module:
    """Return a net whose parameters are of a Python subclass."""

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
        for layer in (model[0], model[2]):
            layer.weight, layer.bias = Tagged(layer.weight.detach()), Tagged(layer.bias.detach())
        return model

    return seeded(0, build)


@PRECISIONS
@STAGES
def test_python_subclasses_with_ordinary_memory_train_as_any_parameter(
    stage: int, precision: MixedPrecision | None
) -> None:
    def program(group: Transport) -> nn.Module:
        model = tagged()
        optimizer = zero(model, group, stage, mixed_precision=precision)
        assert not optimizer.describe().replicated_bytes
        train(model, optimizer)
        optimizer.close()
        return model

    for model in on_threads(2, program, timeout=10):
        assert_same_model(model, plain(precision, tagged()))
        assert all(type(parameter) is Tagged for parameter in model.parameters())


# -- calls -----------------------------------------------------------------------------------------------------------


UNFROZEN = "'blocks.2.weight' requires a gradient now, but was frozen when the optimizer was built, and is not sharded"


@STAGES
def test_one_that_is_unfrozen_later_is_an_error_on_every_rank_until_it_is_frozen_again(stage: int) -> None:
    def program(group: Transport) -> tuple[list[str], nn.Module]:
        model = qlora()
        optimizer = zero(model, group, stage)
        train(model, optimizer, 0, 4)
        inputs, targets = BATCHES[4 + group.rank]
        weight = model.blocks[2].weight
        if group.rank == 1:
            weight.requires_grad_(True)
        nn.functional.mse_loss(model(inputs), targets).backward()
        told = [error_of(optimizer.clip_grad_norm_, 1.0), error_of(optimizer.step)]
        weight.requires_grad_(False)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, 6, 8)
        weight.requires_grad_(True)
        optimizer.close()
        return told, model

    for told, model in on_threads(2, program, timeout=10):
        for text in told:
            assert f"rank 1: {UNFROZEN} (Parameter, torch.float8_e4m3fn)" in text
            assert "freeze it again with requires_grad_(False)" in text
        assert_same_qlora(model, plain())


@STAGES
@pytest.mark.by_default("2")
def test_states_are_those_of_the_plain_class_over_all_parameters(stage: int) -> None:
    expected = qlora()
    reference = torch.optim.AdamW(expected.parameters(), lr=1e-2)
    PlainLoop(optimizer=reference).run(expected, BATCHES[:4])
    saved, trained = copy.deepcopy(reference.state_dict()), copy.deepcopy(expected.state_dict())
    PlainLoop(optimizer=reference).run(expected, BATCHES[4:])

    def program(group: Transport) -> Any:
        model = qlora()
        optimizer = zero(model, group, stage)
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
        return found, model

    results = on_threads(2, program, timeout=10)
    found = results[0][0]
    assert_same_states(found, saved)
    assert found["param_groups"][0]["params"] == saved["param_groups"][0]["params"]
    assert found["param_groups"][0]["param_names"] == [name for name, _ in qlora().named_parameters()]
    for _, model in results:
        assert_same_qlora(model, expected)


@STAGES
@pytest.mark.by_default("2")
def test_calls_take_one_as_any_frozen_parameter(stage: int) -> None:
    def program(group: Transport) -> nn.Module:
        model = qlora()
        optimizer = zero(model, group, stage)
        bases = list(model.bases().values())
        inputs, targets = BATCHES[group.rank]
        nn.functional.mse_loss(model(inputs), targets).backward()
        for base in bases:
            assert optimizer.full_grad(base) is None
            assert optimizer.state[base] == {}
            for mine, other in zip(inside(optimizer.full_master(base)), inside(base), strict=True):
                assert_same_bits(mine, other)
        optimizer.zero_grad()
        with optimizer.gathered(bases):
            pass
        with optimizer.gathered():
            copied, whole = copy.deepcopy(model), model.state_dict()
        for (name, base), other in zip(model.bases().items(), copied.bases().values(), strict=True):
            for mine, theirs, held in zip(inside(base), inside(other), inside(whole[name]), strict=True):
                assert_same_bits(theirs, mine)
                assert_same_bits(held, mine)
        with optimizer.join():
            for inputs, targets in BATCHES[: 1 + group.rank]:
                nn.functional.mse_loss(model(inputs), targets).backward()
                with optimizer.gathered(bases[:1]):
                    pass
                assert optimizer.full_grad(bases[0]) is None
                optimizer.zero_grad()
        train(model, optimizer)
        optimizer.close()
        return model

    for model in on_threads(2, program, timeout=10):
        assert_same_qlora(model, plain())


@pytest.mark.parametrize("all_at_once", [True, False])
@STAGES
def test_writes_inside_gathered_are_rank_0s_and_of_subclasses_everybodys(stage: int, all_at_once: bool) -> None:
    def program(group: Transport) -> tuple[nn.Module, str]:
        model = qlora()
        optimizer = zero(model, group, stage)
        bases: Any = model.bases()
        chosen = None if all_at_once else list(bases.values())
        with optimizer.gathered(chosen, write=True), torch.no_grad():
            for number in range(len(COPIED) if group.rank == 0 else 0):
                bases[f"blocks.{number}.weight"].copy_(bases[f"blocks.{number}.weight"].flip(0))
            bases["blocks.4.weight"].scale.mul_(2)

        def differently() -> None:
            with optimizer.gathered(chosen, write=True):
                if group.rank == 1:
                    bases["blocks.4.weight"].scale.mul_(2)

        told = error_of(differently)
        if group.rank == 1:
            bases["blocks.4.weight"].scale.div_(2)
        train(model, optimizer)
        optimizer.close()
        return model, told

    expected = qlora()
    with torch.no_grad():
        for number in range(len(COPIED)):
            weight = expected.blocks[number].weight
            weight.copy_(weight.flip(0))
        bases: Any = expected.bases()
        bases["blocks.4.weight"].scale.mul_(2)
    plain(model=expected)
    for model, told in on_threads(2, program, timeout=10):
        assert "ValueError: not the same on every rank: 'blocks.4.weight'" in told
        assert_same_qlora(model, expected)


@STAGES
def test_copies_that_came_apart_are_found(stage: int) -> None:
    def program(group: Transport) -> str:
        model = qlora()
        optimizer = zero(model, group, stage)
        with torch.no_grad():
            model.blocks[1].weight.add_(group.rank)
        return error_of(optimizer.check_replicas)

    for told in on_threads(2, program, timeout=10):
        assert "'blocks.1.weight' differs between rank 0 and rank 1" in told


@pytest.mark.parametrize("module", [True, False])
@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.by_default("2-True")
def test_a_list_or_a_group_may_hold_what_is_replicated(stage: int, module: bool) -> None:
    def program(group: Transport) -> tuple[list[int], Tensor, str, nn.Module]:
        model = holder(torch.full((3,), group.rank + 1, dtype=torch.int8))
        given = [model.held, model.layer.weight]
        optimizer = zero(given, group, stage, module=model if module else None)
        more = nn.Parameter(torch.full((2,), group.rank + 7, dtype=torch.uint8), requires_grad=False)
        optimizer.add_param_group({"params": [more, model.layer.bias]})
        assert model.held.tolist() == [1, 1, 1]
        again = error_of(optimizer.add_param_group, {"params": [more]})
        train(model, optimizer)
        optimizer.consolidate_state_dict(group.rank * 0)
        indices = [] if group.rank else [g["params"] for g in optimizer.state_dict()["param_groups"]]
        optimizer.close()
        return indices, more, again, model

    results = on_threads(2, program, timeout=10)
    assert results[0][0] == [[0, 1], [2, 3]]
    for _, more, again, model in results:
        assert more.tolist() == [7, 7]
        assert "'parameter 2' is in a param group already" in again
        assert_same_model(model, plain(model=holder(torch.ones(3, dtype=torch.int8))))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_replicated_one_that_overlaps_itself_is_an_error(stage: int) -> None:
    model = holder(torch.ones(1, 4, dtype=torch.uint8).expand(5, 4))
    with pytest.raises(ValueError, match=r"'held' overlaps itself in memory .*clone"):
        zero(model.layer.parameters(), None, stage, module=model)


@pytest.mark.parametrize("stage", [2, 3])
def test_nothing_to_train_is_an_error(stage: int) -> None:
    model = nn.Module()
    model.held = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match="no listed parameter can be trained: all are frozen"):
        zero(model, None, stage)


# -- from the meta device ----------------------------------------------------------------------------------------------


class Base(nn.Module):
    """Quantized numbers that a module computes itself."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, 3, dtype=dtype), requires_grad=False)
        self.gain = nn.Parameter(torch.empty(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.gain.fill_(2)
            self.weight.copy_((torch.arange(WIDTH * 3).view(WIDTH, 3) / 4).to(self.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (
            x @ self.weight.real.float() * self.gain
            if self.weight.is_complex()
            else x @ self.weight.float() * self.gain
        )


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.complex64])
@STAGES
@pytest.mark.by_default("3-dtype0")
def test_replicated_ones_get_values_from_the_meta_device_as_others_do(stage: int, dtype: torch.dtype) -> None:
    def program(group: Transport) -> nn.Module:
        with torch.device("meta"):
            model = Base(dtype)
        optimizer = zero(model, group, stage)
        train(model, optimizer)
        optimizer.close()
        return model

    for model in on_threads(2, program, timeout=10):
        assert_same_qlora(model, plain(model=Base(dtype)))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_subclass_on_the_meta_device_is_named_and_one_with_values_stays(stage: int) -> None:
    def program(group: Transport) -> tuple[str, nn.Module]:
        model = qlora("wrapper")
        model.blocks[0].weight = nn.Parameter(
            Quantised(*(part.to("meta") for part in inside(model.blocks[0].weight))), requires_grad=False
        )
        told = error_of(zero, model, group, stage)
        model = qlora("wrapper")
        model.blocks[0].up = nn.Parameter(model.blocks[0].up.to("meta"))
        values = qlora("wrapper").blocks[0].up.detach()
        optimizer = zero(model, group, stage, param_init_fn=lambda block: block.up.copy_(values))
        train(model, optimizer)
        optimizer.close()
        return told, model

    for told, model in on_threads(2, program, timeout=10):
        assert "'blocks.0.weight' is a Quantised on the meta device, which only its own class could give memory" in told
        assert_same_qlora(model, plain(model=qlora("wrapper")))


# -- further groups ---------------------------------------------------------------------------------------------------


class Grown(nn.Module):
    """A net, half of which is listed at first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


@pytest.mark.parametrize("inside_model", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.by_default("1-True")
def test_a_group_without_names_is_taken_after_a_module(stage: int, inside_model: bool) -> None:
    def both() -> tuple[nn.Module, nn.Module]:
        model = holder(torch.ones(3, dtype=torch.int8))
        return model, seeded(1, lambda: nn.Linear(WIDTH, WIDTH))

    def grow(model: nn.Module, new: nn.Module) -> None:
        model.register_forward_pre_hook(lambda _, inputs: (new(inputs[0]),))
        if inside_model:
            model.new = new

    def program(group: Transport) -> tuple[Any, nn.Module, nn.Module]:
        model, new = both()
        optimizer = zero(model, group, stage)
        train(model, optimizer, 0, 4)
        grow(model, new)
        optimizer.add_param_group({"params": new.parameters(), "lr": 0.5})
        train(model, optimizer, 4, 8)
        optimizer.consolidate_state_dict(0)
        saved = optimizer.state_dict() if group.rank == 0 else None
        optimizer.close()
        return saved, model, new

    expected, new = both()
    reference = torch.optim.AdamW(expected.parameters(), lr=1e-2)
    PlainLoop(optimizer=reference).run(expected, BATCHES[:4])
    grow(expected, new)
    reference.add_param_group({"params": new.parameters(), "lr": 0.5})
    expected.new = new  # the plain loop here divides and clips all parameters of its model
    PlainLoop(optimizer=reference).run(expected, BATCHES[4:])
    results = on_threads(2, program, timeout=10)
    assert_same_states(results[0][0], reference.state_dict())
    names = ["new.weight", "new.bias"] if inside_model else ["parameter 3", "parameter 4"]
    assert results[0][0]["param_groups"][1]["param_names"] == names
    for _, model, grown in results:
        assert_same_model(model.layer, expected.layer)
        assert_same_model(grown, new)


def test_at_stage_3_a_group_without_names_is_taken_where_the_module_has_it() -> None:
    def program(group: Transport) -> tuple[Any, nn.Module]:
        model = seeded(0, Grown)
        layers: Any = model.layers
        optimizer = zero([(f"layers.0.{n}", p) for n, p in layers[0].named_parameters()], group, 3, module=model)
        optimizer.add_param_group({"params": layers[2].parameters()})
        train(model, optimizer)
        names = [group["param_names"] for group in optimizer.param_groups]
        optimizer.close()
        return names, model

    for names, model in on_threads(2, program, timeout=10):
        assert names == [["layers.0.weight", "layers.0.bias"], ["layers.2.weight", "layers.2.bias"]]
        assert_same_model(model, plain(model=seeded(0, Grown)))


def test_a_group_of_which_some_have_names_is_refused_as_by_torch() -> None:
    model = holder(torch.ones(3))
    optimizer = zero(model, None, 2)
    new = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="Some param names are missing"):
        optimizer.add_param_group({"params": [("weight", new.weight), new.bias]})
    optimizer.add_param_group({"params": new.named_parameters()})
    assert optimizer.param_groups[1]["param_names"] == ["weight", "bias"]
