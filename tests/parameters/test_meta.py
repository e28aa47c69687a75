"""Models that were built on the meta device: the values of plain construction, and never more than two whole units."""

from __future__ import annotations

import resource
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from collectives import Transport, on_threads, solo
from zero import MixedPrecision, ZeroOptimizer
from zero.core.parameter_specs import is_released

from ..support.plain import assert_same_bits
from ..support.pool import GlooPool

ALL = pytest.mark.parametrize("stage", [0, 1, 2, 3])
MIB = 1 << 20
_BUILDING = threading.Lock()


class Net(nn.Module):
    """A net whose leaves initialize themselves once, in order of registration; a batch norm has buffers, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(50, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)) for _ in range(4)
        )
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.first(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        result: Tensor = self.last(self.norm(hidden))
        return result


def on_meta(make: Callable[[], nn.Module] = Net) -> Any:
    with torch.device("meta"):
        return make()


def plain(seed: int = 0) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net()


def trained(group: dist.ProcessGroup, rank: int, stage: int, meta: bool, bf16: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = on_meta() if meta else Net()
    optimizer = ZeroOptimizer(
        model,
        stage=stage,
        process_group=group,
        bucket_cap_mb=0.001,
        lr=1e-2,
        mixed_precision=MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16) if bf16 else None,
    )
    begun = [optimizer.full_master(parameter) for parameter in model.parameters()]
    tokens = torch.arange(12) + rank
    nn.functional.cross_entropy(model(tokens), tokens).backward()
    optimizer.step()
    optimizer.close()
    return [*begun, *(p.detach() for p in model.parameters()), *model.buffers()]


@ALL
@pytest.mark.parametrize(("ranks", "bf16"), [(1, False), (2, False), (3, True)])
@pytest.mark.by_default("1-False-1", "3-True-3")
def test_one_seed_gives_the_bits_of_plain_construction(gloo: GlooPool, stage: int, ranks: int, bf16: bool) -> None:
    members = range(ranks)
    expected = gloo.run(trained, stage, False, bf16, ranks=members)
    for ours, theirs in zip(gloo.run(trained, stage, True, bf16, ranks=members), expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert_same_bits(a, b)


def values_of(model: nn.Module, optimizer: ZeroOptimizer) -> dict[str, Tensor]:
    with optimizer.gathered():
        return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


class Lazy(Mapping[str, Tensor]):
    """A state dict that records its reads."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self._values, self.read = values, list[str]()

    def __getitem__(self, name: str) -> Tensor:
        self.read.append(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@ALL
@pytest.mark.by_default("1")
def test_a_state_dict_is_read_tensor_by_tensor_in_order_of_registration(stage: int) -> None:
    expected = plain(3).state_dict()

    def program(transport: Transport) -> None:
        with _BUILDING:
            model = on_meta()
        given = Lazy(expected)
        optimizer = ZeroOptimizer(
            model, stage=stage, process_group=transport, bucket_cap_mb=0.001, init_state_dict=given
        )
        assert given.read == list(expected)
        for name, value in values_of(model, optimizer).items():
            assert_same_bits(value, expected[name])

    on_threads(2, program)


def test_a_safetensors_file_is_read_where_it_lies(tmp_path: Path) -> None:
    expected = plain(3).state_dict()
    names = list(expected)
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for file, part in zip(files, (names[:7], names[7:]), strict=True):
        save_file({name: expected[name] for name in part}, file)
    model = on_meta()
    optimizer = ZeroOptimizer(model, stage=3, process_group=solo(), init_state_dict=files)
    for name, value in values_of(model, optimizer).items():
        assert_same_bits(value, expected[name])
    with pytest.raises(ValueError, match="cannot be read"):
        ZeroOptimizer(on_meta(), process_group=solo(), init_state_dict=tmp_path / "missing.safetensors")
    with pytest.raises(ValueError, match=r"a.safetensors has '.*', which another file has, too"):
        ZeroOptimizer(on_meta(), process_group=solo(), init_state_dict=[files[0], files[0]])


@ALL
def test_a_function_of_the_user_s_sees_each_module_once_with_memory(stage: int) -> None:
    seen: list[str] = []

    def init(module: nn.Module) -> None:
        seen.append(type(module).__name__)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            assert tensor.device.type == "cpu"
            tensor.fill_(len(seen))

    model = on_meta()
    optimizer = ZeroOptimizer(model, stage=stage, process_group=solo(), param_init_fn=init)
    assert seen == ["Embedding", *["Linear", "LayerNorm", "Linear"] * 4, "BatchNorm1d", "Linear"]
    values = values_of(model, optimizer)
    assert values["first.weight"].eq(1).all()
    assert values["last.bias"].eq(15).all()
    assert values["norm.running_var"].eq(14).all()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Embedding(20, 4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 20)
        self.last.weight = self.first.weight

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.last(self.middle(self.first(tokens)))
        return result


@ALL
def test_ties_frozen_parameters_and_what_is_kept_on_parameters_stay(stage: int) -> None:
    model = on_meta(Tied)
    weight = model.first.weight
    weight.note = "kept"
    model.middle[0].bias.requires_grad_(False)
    optimizer = ZeroOptimizer(model, stage=stage, process_group=solo())
    assert model.first.weight is model.last.weight is weight is optimizer.param_groups[0]["params"][0]
    assert weight.note == "kept"
    assert not model.middle[0].bias.requires_grad
    model(torch.arange(5)).sum().backward()
    optimizer.step()


@ALL
@pytest.mark.by_default("3")
def test_a_rank_may_have_values_where_others_have_none(stage: int) -> None:
    """All ranks get rank 0's values."""
    expected = plain(5).state_dict()

    def program(transport: Transport) -> None:
        with _BUILDING:
            model = on_meta() if transport.rank else plain(5)
        optimizer = ZeroOptimizer(model, stage=stage, process_group=transport, bucket_cap_mb=0.001)
        for name, value in values_of(model, optimizer).items():
            assert_same_bits(value, expected[name])

    on_threads(3, program)


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("listed", [slice(None), slice(1, None, 2), slice(7, None)], ids=["all", "every other", "last"])
def test_at_stage_3_what_came_before_is_sharded_when_a_module_gets_memory(listed: slice) -> None:
    """Of eight units, each with one bucket, at most two have whole tensors at once.

    This holds whichever units the optimizer updates.
    """

    def program(transport: Transport) -> list[int]:
        with _BUILDING:
            model = on_meta(lambda: nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8))))
        held = []

        def init(module: nn.Module) -> None:
            held.append(sum(p.device.type == "cpu" and not is_released(p) for p in model.parameters()))
            nn.init.ones_(module.weight)

        chosen = list(model.parameters())[listed]
        given: dict[str, Any] = {"stage": 3, "process_group": transport, "bucket_cap_mb": 0.0001}
        ZeroOptimizer(chosen, module=model, param_init_fn=init, **given).close()
        return held

    for held in on_threads(2, program):
        assert len(held) == 8
        assert max(held) <= 2


UNITS, WIDTH = 8, 3072  # 36 MiB each: the C library returns blocks above 32 MiB to the system as soon as they are freed


def address_space() -> int:
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("VmSize:"))


def built_within(group: dist.ProcessGroup, rank: int, room: int) -> bool:
    """Return whether a model can be built by a rank that gets this many more bytes of address space."""

    def build(units: int, width: int) -> ZeroOptimizer:
        model = on_meta(lambda: nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(units))))
        return ZeroOptimizer(model, torch.optim.SGD, lr=0.1, stage=3, process_group=group, collective="pairwise")

    build(2, 8)  # allocate everything that is allocated once
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + room, limits[1]))
    try:
        optimizer = build(UNITS, WIDTH)
        held = optimizer.describe().bytes["parameters"]
        return abs(held - UNITS * WIDTH * WIDTH) <= MIB  # a quarter of 4 bytes an element
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.full
def test_a_model_that_no_rank_may_hold_is_built_within_its_shards_and_two_units(gloo: GlooPool) -> None:
    whole = 4 * UNITS * WIDTH * WIDTH
    unit = whole // UNITS
    room = whole // 4 + 2 * unit + 40 * MIB  # for threads, and for memory that the allocator keeps
    assert room < 2 * whole // 3
    assert gloo.run(built_within, room, ranks=range(4)) == [True] * 4


# -- tensors that have values ------------------------------------------------------------------------------------------


@ALL
def test_a_state_dict_is_for_what_had_memory_too(stage: int) -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)))
    with torch.device("cpu"):
        model[0], model[1] = nn.Linear(2, 2), nn.BatchNorm1d(2)
    given = {name: torch.full(value.shape, 7, dtype=value.dtype) for name, value in model.state_dict().items()}
    optimizer = ZeroOptimizer(model, stage=stage, process_group=solo(), bucket_cap_mb=1e-4, init_state_dict=given)
    for value in values_of(model, optimizer).values():
        assert value.eq(7).all()


@ALL
@pytest.mark.parametrize("cap", [1e-4, 25.0])
@pytest.mark.by_default("25.0-1")
def test_what_a_module_draws_leaves_alone_what_has_values(stage: int, cap: float) -> None:
    """A tied parameter whose values came with another module, and tensors that were never on the meta device."""

    def build(model: nn.Module, **given: Any) -> dict[str, Tensor]:
        optimizer = ZeroOptimizer(model, stage=stage, process_group=solo(), bucket_cap_mb=cap, **given)
        return values_of(model, optimizer)

    weight = torch.randn(20, 4)
    given = {name: value for name, value in Tied().state_dict().items() if name not in ("last.weight", "last.bias")}
    found = build(
        on_meta(Tied),
        init_state_dict={**given, "first.weight": weight},
        param_init_fn=lambda module: [parameter.fill_(3) for parameter in module.parameters(False)],
    )
    assert_same_bits(found["last.weight"], weight)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first = nn.Embedding(20, 4).weight
        torch.manual_seed(0)
        assert_same_bits(build(on_meta(Tied))["first.weight"], first)
    norm = on_meta(lambda: nn.BatchNorm1d(2))
    norm.weight = nn.Parameter(torch.full((2,), 5.0))
    found = build(norm)
    assert found["weight"].eq(5).all()
    assert found["bias"].eq(0).all()


def test_hooks_and_attributes_are_not_lost_in_silence() -> None:
    model = on_meta()
    model.last.weight.register_hook(print)
    with pytest.raises(ValueError, match=r"'last.weight' is on the meta device and has hooks, which it would lose"):
        ZeroOptimizer(model, process_group=solo())
    model = on_meta()
    model.norm.running_mean.note = "kept"
    reference = weakref.ref(model.last.bias)
    with pytest.raises(ValueError, match=r"'last.bias' is on the meta device and cannot be given memory: .*weakref"):
        ZeroOptimizer(model, process_group=solo())
    del reference
    ZeroOptimizer(model, process_group=solo())
    assert model.norm.running_mean.note == "kept"


class Forgetful(nn.Linear):
    """A module that cannot initialize its mask again."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(2, 2)
        self.register_buffer("mask", torch.ones(2, dtype=dtype), persistent=False)


class Replacing(nn.Linear):
    def reset_parameters(self) -> None:
        self.weight = nn.Parameter(torch.ones(2, 2))


def replace(module: nn.Module) -> None:
    module.bias = nn.Parameter(torch.ones(2))


@ALL
@pytest.mark.parametrize(
    ("build", "given", "said"),
    [
        (lambda: Forgetful(torch.float32), {}, "'mask' was on the meta device and has no value: .*reset_parameters"),
        (lambda: Forgetful(torch.int64), {}, "'mask' was on the meta device and has no value"),
        (
            lambda: Forgetful(torch.float32),
            {"init_state_dict": {"weight": torch.ones(2, 2), "bias": torch.ones(2)}},
            "'mask' was on the meta device and has no value",
        ),
        (lambda: Replacing(2, 2), {}, "reset_parameters.. replaced parameter or buffer 'weight'"),
        (
            lambda: nn.Linear(2, 2),
            {"param_init_fn": replace},
            "param_init_fn replaced parameter or buffer",
        ),
        (
            lambda: nn.Linear(2, 2),
            {"init_state_dict": Lazy({"weight": torch.ones(2, 2), "bias": torch.ones(())})},
            r"'bias' has shape \(2,\), but \(\) in the state dict",
        ),
        (
            lambda: nn.Linear(2, 2),
            {"init_state_dict": {"weight": torch.ones(2, 2), "bias": torch.ones(2, device="meta")}},
            "init_state_dict has 'bias' on the meta device: give it values",
        ),
    ],
)
def test_values_that_would_be_none_are_told(
    stage: int, build: Callable[[], nn.Module], given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        ZeroOptimizer(on_meta(build), torch.optim.SGD, lr=0.1, stage=stage, process_group=solo(), **given)


@ALL
def test_what_a_state_dict_says_counts_whatever_it_is(stage: int) -> None:
    """Weights of a run that diverged, including the largest number."""
    given = {
        name: torch.full_like(value, float("nan") if value.is_floating_point() else torch.iinfo(value.dtype).max)
        for name, value in plain(3).state_dict().items()
    }
    model = on_meta()
    optimizer = ZeroOptimizer(model, stage=stage, process_group=solo(), init_state_dict=given)
    for name, value in values_of(model, optimizer).items():
        assert_same_bits(value, given[name])


@ALL
def test_a_state_dict_is_let_go(stage: int) -> None:
    class Values(dict[str, Tensor]):
        """A state dict that supports weak references."""

    given = Values(plain(3).state_dict())
    reference = weakref.ref(given)
    optimizer = ZeroOptimizer(on_meta(), stage=stage, process_group=solo(), init_state_dict=given)
    del given
    assert reference() is None
    optimizer.close()


# -- errors ------------------------------------------------------------------------------------------------------------


class Silent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


@ALL
def test_a_module_without_a_way_to_its_values_is_named_on_every_rank(stage: int) -> None:
    def program(transport: Transport) -> str:
        with _BUILDING:
            model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Silent()))
        with pytest.raises(ValueError, match="reset_parameters") as caught:
            ZeroOptimizer(model, stage=stage, process_group=transport)
        return str(caught.value)

    for told in on_threads(2, program):
        assert "'1.scale' is on the meta device, and its module '1' (Silent) has no reset_parameters()" in told
        assert "pass param_init_fn, which for a model of transformers is model._init_weights, or a state" in told


def test_a_state_dict_has_what_the_model_has_unless_a_function_says_what_is_missing() -> None:
    def build(**given: Any) -> Any:
        model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Silent()))
        ZeroOptimizer(model, process_group=solo(), **given).close()
        return model

    scale = {"1.scale": torch.full((3,), 2.0)}
    with pytest.raises(ValueError, match=r"init_state_dict has no '0.weight', which the model has: pass param_init_fn"):
        build(init_state_dict=scale)
    with pytest.raises(ValueError, match=r"init_state_dict has 'module.1.scale', which the model has not"):
        build(init_state_dict={"module.1.scale": scale["1.scale"]}, param_init_fn=nn.Module.cpu)
    model = build(init_state_dict=scale, param_init_fn=lambda module: [p.fill_(3) for p in module.parameters(False)])
    assert model[1].scale.eq(2).all()
    assert model[0].weight.eq(3).all()


@ALL
@pytest.mark.parametrize("name", ["first.weight", "last.weight"])
def test_a_tie_is_found_by_either_of_its_names(stage: int, name: str) -> None:
    with torch.random.fork_rng():
        expected = Tied().state_dict()
    weight = torch.randn(20, 4)
    given = {key: value for key, value in expected.items() if key not in ("first.weight", "last.weight")}
    model = on_meta(Tied)
    optimizer = ZeroOptimizer(model, stage=stage, process_group=solo(), init_state_dict={**given, name: weight})
    assert_same_bits(values_of(model, optimizer)["first.weight"], weight)


@pytest.mark.parametrize(
    ("build", "arguments", "said"),
    [
        (Net, {"param_init_fn": print}, "this one has values: build it under"),
        (
            lambda: on_meta(),
            {"init_state_dict": {"last.bias": torch.ones(3)}, "param_init_fn": print},
            r"'last.bias' has shape \(50,\), but \(3,\)",
        ),
    ],
)
def test_what_does_not_fit_is_told(build: Callable[[], nn.Module], arguments: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ZeroOptimizer(build(), process_group=solo(), **arguments)


def test_the_optimizer_is_built_where_there_is_memory() -> None:
    model = on_meta()
    with torch.device("meta"), pytest.raises(ValueError, match="build the optimizer outside of"):
        ZeroOptimizer(model, process_group=solo())


def test_parameters_alone_have_no_module_that_could_give_them_values() -> None:
    with pytest.raises(ValueError, match="parameters on the meta device need their module"):
        ZeroOptimizer(list(on_meta().parameters()), process_group=solo())


class Unreadable(Lazy):
    def __iter__(self) -> Iterator[str]:
        raise OSError("no such disk")


class Torn(Lazy):
    def __getitem__(self, name: str) -> Tensor:
        if name == "last.weight":
            raise OSError("no such block")
        return super().__getitem__(name)


@ALL
@pytest.mark.parametrize("kind", [Unreadable, Torn])
@pytest.mark.by_default("Torn-1")
def test_a_state_dict_that_one_rank_cannot_read_is_told_by_all_at_once(stage: int, kind: type[Lazy]) -> None:
    values = plain(3).state_dict()

    limit = 30.0

    def program(transport: Transport) -> str:
        with _BUILDING:
            model = on_meta()
        given = (kind if transport.rank == 1 else Lazy)(values)
        begin = time.monotonic()
        with pytest.raises((OSError, ValueError, RuntimeError)) as caught:
            ZeroOptimizer(model, stage=stage, process_group=transport, init_state_dict=given)
        assert time.monotonic() - begin < limit, "a message brought it, no time limit"
        return str(caught.value)

    for said in on_threads(3, program, timeout=limit):
        assert "no such" in said
        assert kind is Unreadable or "module 'last'" in said


def test_a_module_that_failed_may_be_tried_again() -> None:
    failing = [True]

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.BatchNorm1d) and failing:
            raise KeyError("nothing for it")
        for tensor in (*module.parameters(False), *module.buffers(False)):
            tensor.fill_(2)

    model = on_meta()
    with pytest.raises(RuntimeError, match="while module 'norm' got its values: KeyError: 'nothing for it'"):
        ZeroOptimizer(model, process_group=solo(), param_init_fn=init)
    failing.clear()
    ZeroOptimizer(model, process_group=solo(), param_init_fn=init)
    assert all(value.eq(2).all() for value in model.state_dict().values())


@ALL
def test_nothing_has_memory_before_the_arguments_are_known_to_be_right(stage: int) -> None:
    model = on_meta()
    with pytest.raises(ValueError, match="element-wise"):
        ZeroOptimizer(model, torch.optim.Adafactor, stage=stage, process_group=solo(), partition="element")
    assert all(tensor.device.type == "meta" for tensor in (*model.parameters(), *model.buffers()))
    ZeroOptimizer(model, stage=stage, process_group=solo()).close()


def test_a_stranger_on_the_meta_device_is_named() -> None:
    stranger = nn.Parameter(torch.ones(2, device="meta"))
    model = on_meta()
    with pytest.raises(ValueError, match="parameter 1 of those listed is on the meta device and not in the module"):
        ZeroOptimizer([model.last.weight, stranger], module=model, process_group=solo())
    optimizer = ZeroOptimizer([model.last.weight], module=model, process_group=solo())
    with pytest.raises(ValueError, match="no ordinary memory"):
        optimizer.add_param_group({"params": [stranger]})
