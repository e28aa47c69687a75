"""The blocks of `zero/checkpoint/DEEPSPEED.md` read what DeepSpeed writes, and training goes on from there.

Those that train with DeepSpeed skip if it is not installed (the extra
`peers`); the others read a file that torch wrote in its form.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from zero import MixedPrecision, ZeroOptimizer

from ...support.launched import launch
from ...support.loops import PlainLoop, blocks_of, seeded
from ...support.plain import assert_same_bits, assert_same_states

PAGE = Path(zero.__file__).parent / "checkpoint" / "DEEPSPEED.md"
BLOCKS = blocks_of(PAGE.read_text())
WORLD_SIZE, STEPS = 2, 3
CASES: dict[str, dict[str, Any]] = {
    "1": {"stage": 1},
    "2": {"stage": 2},
    "2-round-robin": {"stage": 2, "round_robin_gradients": True},  # another order of the parameters
    "3": {"stage": 3},
    "3-parts": {"stage": 3, "sub_group_size": 16},  # a param group has several flat tensors
    "2-bf16": {"stage": 2},
    "3-bf16": {"stage": 3},
}

PRECISIONS = {"fp32": None, "bf16": MixedPrecision(torch.bfloat16)}

pytestmark = pytest.mark.timeout(300)


def block(heading: str) -> Any:
    return compile(BLOCKS[heading], f"DEEPSPEED.md, {heading!r}", "exec")


class TiedAndFrozen(nn.Module):
    """A model with a tied, a frozen and an unused parameter, and a buffer; no number of elements is even."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 3, bias=False)
        self.tied = nn.Linear(5, 3, bias=False)
        self.tied.weight = self.second.weight
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.tensor([0.5, -1.0, 2.0]), requires_grad=False)
        self.register_buffer("shift", torch.tensor([0.25, 0.0, -1.0]))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x) * self.scale)
        found: Tensor = self.second(hidden) * self.frozen + self.tied(hidden / 2) + self.shift
        return found


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return two param groups with names, without what is frozen."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [pair for pair in named if pair[1].dim() > 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [pair for pair in named if pair[1].dim() == 1], "lr": 2e-2},
    ]


def batches(seed: int, count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(4, 3, generator=generator), torch.randn(4, 3, generator=generator)) for _ in range(count)]


def train_with_deepspeed(names: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train and save in each case. Return what DeepSpeed reports: weights and states by the names of parameters."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # type: ignore[import-not-found]
    from deepspeed.utils import (  # type: ignore[import-not-found]
        safe_get_full_fp32_param,
        safe_get_full_optimizer_state,
    )

    reported: dict[str, Any] = {}
    for case, options in CASES.items():
        model = seeded(5, TiedAndFrozen)
        unnamed = [{**group, "params": [p for _, p in group["params"]]} for group in groups_of(model)]
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": options,
            "bf16": {"enabled": case.endswith("bf16")},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(unnamed, lr=1e-2), config=config)
        for inputs, targets in batches(1, STEPS * WORLD_SIZE)[names["rank"] :: WORLD_SIZE]:
            engine.backward(nn.functional.mse_loss(engine(inputs.to(model.scale.dtype)).float(), targets))
            engine.step()
        engine.save_checkpoint(str(folder / case))
        if options["stage"] < 3:  # states of all param groups but the first are missing in its own reports
            engine.optimizer._hp_optimizer_states_linked = False
            engine.optimizer._lazy_init_hp_params_optimizer_state()
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        reported[case] = {
            "weights": {name: safe_get_full_fp32_param(p) for name, p in trained},
            **{
                state: {name: safe_get_full_optimizer_state(p, state) for name, p in trained}
                for state in ("exp_avg", "exp_avg_sq")
            },
        }
        engine.destroy()
    reported["2-round-robin"] = reported["2"]  # its own reports are mixed up; two ranks' sums have one order
    return reported


def train_on(names: dict[str, Any], folder: Path) -> dict[tuple[str, str], list[dict[str, Tensor]]]:
    """Train on by the blocks of the page, in each precision, at each of our stages. Return the states of the models,
    and the master weights."""
    results: dict[tuple[str, str], list[dict[str, Tensor]]] = {}
    for case, (text, precision), stage in itertools.product(CASES, PRECISIONS.items(), range(4)):
        scope = {name: value for name, value in names.items() if not name.startswith("__")}
        scope |= {"path": str(folder / case), "stage": stage, "model": seeded(6, TiedAndFrozen)}
        scope["ZeroOptimizer"] = functools.partial(ZeroOptimizer, mixed_precision=precision)
        exec(block("Reading it"), scope)
        exec(block("Training on"), scope)
        model, optimizer = scope["model"], scope["optimizer"]
        for inputs, targets in batches(2, STEPS * WORLD_SIZE)[names["rank"] :: WORLD_SIZE]:
            nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        optimizer.check_replicas()
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        masters = {f"master of {name}": optimizer.full_master(p) for name, p in trained}
        optimizer.close()
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
        results.setdefault((case, text), []).append(state | masters)
    return results


def plain_from(reported: dict[str, dict[str, Tensor]]) -> tuple[nn.Module, Callable[..., torch.optim.Optimizer]]:
    """Return a plain model with the weights that DeepSpeed has reported, and a function that returns an optimizer with
    the states: of the parameters, or of the master weights that it is given in their order."""
    model = seeded(5, TiedAndFrozen)
    named = dict(model.named_parameters())
    for name, value in reported["weights"].items():
        named[name].data.copy_(value)

    def optimizer_of(updated: Sequence[Tensor] | None = None) -> torch.optim.Optimizer:
        of = dict(zip(named, updated or named.values(), strict=True))
        groups = groups_of(model)
        for group in groups:
            group["params"] = [(name, of[name]) for name, _ in group["params"]]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        for name in reported["weights"]:
            optimizer.state[of[name]] = {
                "step": torch.tensor(float(STEPS)),
                "exp_avg": reported["exp_avg"][name].clone(),
                "exp_avg_sq": reported["exp_avg_sq"][name].clone(),
            }
        return optimizer

    return model, optimizer_of


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return the folder with what DeepSpeed has saved in each case, and what it has reported."""
    pytest.importorskip("deepspeed")
    folder = tmp_path_factory.mktemp("deepspeed")
    return folder, launch("tests.nightly.checkpoint.test_deepspeed:train_with_deepspeed", folder, limit=250)


def reader() -> Any:
    """Return the function of the page that reads a folder."""
    scope: dict[str, Any] = {}
    exec(block("Reading it"), scope)
    return scope["read_deepspeed"]


def test_training_goes_on_with_the_bits_of_the_plain_loop(written: tuple[Path, dict[str, Any]]) -> None:
    """In mixed precision the master weights begin with DeepSpeed's fp32 weights."""
    folder, reported = written
    for (case, text), states in launch("tests.nightly.checkpoint.test_deepspeed:train_on", folder, limit=250).items():
        model, optimizer_of = plain_from(reported[case])
        loop = PlainLoop(precision=PRECISIONS[text], optimizer_of=optimizer_of, max_norm=float("inf"))
        before = {name: value.clone() for name, value in model.named_parameters()}
        optimizer = loop.run(model, batches(2, STEPS * WORLD_SIZE))
        updated: dict[str, Tensor] = {}
        for group in optimizer.param_groups:
            updated |= zip(group["param_names"], group["params"], strict=True)
        changed = {name for name, value in updated.items() if not torch.equal(value, before[name])}
        assert changed == {"first.weight", "first.bias", "second.weight", "scale"}
        expected = model.state_dict() | {f"master of {name}": value.detach() for name, value in updated.items()}
        for (stage, state), (name, value) in itertools.product(enumerate(states), expected.items()):
            assert_same_bits(state[name], value, f"case {case}, {text}, stage {stage}, {name}")


class RunsCode:
    """An object that would make a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def forged(folder: Path) -> Path:
    """Write a folder in the form of stage 1, on one rank, and return its tag's."""
    inside = folder / "tag"
    inside.mkdir()
    (folder / "latest").write_text("tag\n")
    shapes = {"weight": torch.Size([2, 3])}
    options = {"lr": 0.1, "params": [0]}
    rank = {
        "zero_stage": 1,
        "partition_count": [1],
        "single_partition_of_fp32_groups": [torch.arange(6.0)],
        "base_optimizer_state": {"state": {0: {"exp_avg": torch.ones(8), "count": 4}}, "param_groups": [options]},
    }
    model = {"module": {"weight": torch.zeros(2, 3)}, "param_shapes": [shapes], "shared_params": {}, "global_steps": 7}
    torch.save(model, inside / "mp_rank_00_model_states.pt")
    torch.save({"optimizer_state_dict": rank}, inside / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    return inside


def test_a_folder_is_read_without_deepspeed(tmp_path: Path) -> None:
    forged(tmp_path)
    found = reader()(tmp_path)
    assert_same_bits(found["model"]["weight"], torch.arange(6.0).view(2, 3))
    expected = {"exp_avg": torch.ones(2, 3), "count": torch.tensor(4)}
    options = {"lr": 0.1, "params": [0], "param_names": ["weight"]}
    assert_same_states(found["optimizer"], {"state": {0: expected}, "param_groups": [options]})
    assert found["optimizer"]["param_groups"] == [options]


def test_what_cannot_be_read_is_refused_and_runs_no_code(tmp_path: Path) -> None:
    inside = forged(tmp_path)
    of_model, of_rank = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    for name in (of_model, of_rank):
        kept = torch.load(inside / name, weights_only=True)
        torch.save({**kept, "client": RunsCode(tmp_path / "ran")}, inside / name)
        with pytest.raises(ValueError, match=f"{name} is damaged, or holds objects that only unpickling makes, which"):
            reader()(tmp_path)
        assert not (tmp_path / "ran").exists()
        torch.load(inside / name, weights_only=False)
        (tmp_path / "ran").rmdir()
        torch.save(kept, inside / name)
    others = ("mp_rank_01_model_states.pt", "zero_pp_rank_0_mp_rank_01_optim_states.pt", "layer_00-model_states.pt")
    for name in (*others, "expp_rank_0_mp_rank_00_optim_states.pt"):
        (inside / name).write_bytes(b"")
        with pytest.raises(ValueError, match=f"{name}: tensor, pipeline and expert parallelism are not read here"):
            reader()(tmp_path)
        (inside / name).unlink()
    found = torch.load(inside / of_rank, weights_only=True)
    for key, value, words in (
        ("base_optimizer_state", [{}], "was saved with elastic_checkpoint, which leaves the param groups out"),
        ("partition_count", [2], "does not have the states of every rank of ZeRO stage 1, 2 or 3"),
    ):
        found["optimizer_state_dict"][key] = value
        torch.save(found, inside / of_rank)
        with pytest.raises(ValueError, match=words):
            reader()(tmp_path)
    assert set(BLOCKS) == {"Reading it", "Training on"}, "every block of the page is run here"
