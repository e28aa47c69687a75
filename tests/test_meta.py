"""Models that were built on the meta device: the values of plain construction, and never more than two units whole."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from collectives import Transport, on_threads, solo
from zero import MixedPrecision, ZeroOptimizer
from zero.released import is_released

from .plain import assert_same_bits
from .pool import GlooPool

ALL = pytest.mark.parametrize("stage", [0, 1, 2, 3])
MIB = 1 << 20
_BUILDING = threading.Lock()


class Net(nn.Module):
    """Leaves that initialise themselves once, in order of registration; a batch norm has buffers, too."""

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
    """Notes what is read."""

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
    torch_files = pytest.importorskip("safetensors.torch")
    expected = plain(3).state_dict()
    names = list(expected)
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for file, part in zip(files, (names[:7], names[7:]), strict=True):
        torch_files.save_file({name: expected[name] for name in part}, file)
    model = on_meta()
    optimizer = ZeroOptimizer(model, stage=3, process_group=solo(), init_state_dict=files)
    for name, value in values_of(model, optimizer).items():
        assert_same_bits(value, expected[name])
    with pytest.raises(ValueError, match="cannot be read"):
        ZeroOptimizer(on_meta(), process_group=solo(), init_state_dict=tmp_path / "missing.safetensors")


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
def test_a_rank_may_have_values_where_others_have_none(stage: int) -> None:
    """Rank 0's are everybody's."""
    expected = plain(5).state_dict()

    def program(transport: Transport) -> None:
        with _BUILDING:
            model = on_meta() if transport.rank else plain(5)
        optimizer = ZeroOptimizer(model, stage=stage, process_group=transport, bucket_cap_mb=0.001)
        for name, value in values_of(model, optimizer).items():
            assert_same_bits(value, expected[name])

    on_threads(3, program)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_at_stage_3_what_came_before_is_sharded_when_a_module_gets_memory() -> None:
    """Of eight units, each of a bucket, two at most have whole tensors at once."""

    def program(transport: Transport) -> list[int]:
        with _BUILDING:
            model = on_meta(lambda: nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8))))
        held = []

        def init(module: nn.Module) -> None:
            held.append(sum(p.device.type == "cpu" and not is_released(p) for p in model.parameters()))
            nn.init.ones_(module.weight)

        ZeroOptimizer(model, stage=3, process_group=transport, bucket_cap_mb=0.0001, param_init_fn=init).close()
        return held

    for held in on_threads(2, program):
        assert len(held) == 8
        assert max(held) <= 2


UNITS, WIDTH = 8, 3072  # of 36 MiB each: what is larger than 32 MiB the C library gives back as soon as it is freed


def address_space() -> int:
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("VmSize:"))


def built_within(group: dist.ProcessGroup, rank: int, room: int) -> bool:
    """Whether a model can be built by a rank that gets so many bytes more of address space."""

    def build(units: int, width: int) -> ZeroOptimizer:
        model = on_meta(lambda: nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(units))))
        return ZeroOptimizer(model, torch.optim.SGD, lr=0.1, stage=3, process_group=group, collective="pairwise")

    build(2, 8)  # what is made once
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + room, limits[1]))
    try:
        optimizer = build(UNITS, WIDTH)
        held = optimizer.describe().bytes["parameters"]
        return abs(held - UNITS * WIDTH * WIDTH) <= MIB  # a quarter of 4 bytes an element
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_a_model_that_no_rank_may_hold_is_built_within_its_shards_and_two_units(gloo: GlooPool) -> None:
    whole = 4 * UNITS * WIDTH * WIDTH
    unit = whole // UNITS
    room = whole // 4 + 2 * unit + 40 * MIB  # of threads, and what an allocator keeps
    assert room < 2 * whole // 3
    assert gloo.run(built_within, room, ranks=range(4)) == [True] * 4


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
        assert "pass param_init_fn, or a state dict that has it" in told


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
