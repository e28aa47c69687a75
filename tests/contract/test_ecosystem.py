"""Models and optimizers of other libraries: they train to the bits of the plain loop, or are refused.

The recipes for accelerate, Fabric, Lightning and Trainer are tested, too. These tests are outside the default run, and
skip libraries that are not installed: `pip install -e '.[test,ecosystem]'`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import lr_scheduler

from collectives import Transport, on_threads, solo
from zero import MixedPrecision, ZeroOptimizer, load, open_checkpoint, save

from ..support.launched import launch
from ..support.loops import (
    BLOCKS,
    ECOSYSTEM,
    SAMPLES,
    LossOf,
    PlainLoop,
    SchedulerOf,
    autocast_loss,
    code_of,
    constant,
    even,
    network,
    seeded,
)
from ..support.plain import assert_same_bits, assert_same_states, bits, plain_step
from ..support.pool import GlooPool

os.environ["HF_HUB_OFFLINE"] = "1"  # forbid downloads, also in the processes that import this file

pytestmark = [pytest.mark.contract, pytest.mark.slow, pytest.mark.timeout(300)]  # such libraries are slow
STAGES = (0, 1, 2, 3)
WORLD_SIZE = 2
PRECISIONS = ("fp32", "bf16")
WORDS, LENGTH = 31, 8

State = dict[str, Tensor]


def state_of(model: nn.Module) -> State:
    """Return a copy of a model's state, by name."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same_state(ours: State, theirs: State, what: str) -> None:
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert_same_bits(ours[name], value, f"{what}: {name}")


# -- models ------------------------------------------------------------------------------------------------------------


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=16, n_layer=3, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, attention_dropout=0.0, bos_token_id=0, eos_token_id=0,
        attn_implementation="eager",
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Convolutions(nn.Module):
    """A model with batch norm in training mode: the statistics are those of a micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 6, 3, stride=2),
            nn.BatchNorm2d(6),
        )
        self.head = nn.Linear(6, 3)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.head(self.features(images).mean((2, 3)))
        return found


class TiedTransformer(nn.Module):
    """`nn.Transformer`, with one matrix for both embeddings and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.transformer = nn.Transformer(16, 2, 2, 2, dim_feedforward=24, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=hidden.dtype)
        found: Tensor = self.head(self.transformer(hidden, hidden, src_mask=mask, tgt_mask=mask, memory_mask=mask))
        return found


class LowRank(nn.Module):
    """A frozen matrix and a trained one of rank 1 beside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(1, width) / width)
        self.up = nn.Parameter(torch.randn(width, 1) / width)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.tanh(self.frozen(x) + x @ self.down.t() @ self.up.t())
        return found


def adapted() -> nn.Module:
    return nn.Sequential(*(LowRank(256) for _ in range(3)))


class Experts(nn.Module):
    """A layer that sends each token to one expert; an expert without a token does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        found = x.clone()
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero().flatten()
            if len(mine):
                found = found.index_add(0, mine, weights[mine, None] * expert(x[mine]))
        return found


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Experts(), Experts(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.second(self.first(x)))
        return found


# -- micro-batches and losses ------------------------------------------------------------------------------------------


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(count: int) -> list[Any]:
    return list(torch.randint(0, WORDS, (count, 2, LENGTH), generator=generator()))


def images(count: int) -> list[Any]:
    g = generator()
    return [(torch.randn(4, 1, 8, 8, generator=g), torch.randn(4, 3, generator=g)) for _ in range(count)]


def wide(count: int) -> list[Any]:
    g = generator()
    return [(torch.randn(3, 256, generator=g), torch.randn(3, 256, generator=g)) for _ in range(count)]


def few_tokens(count: int) -> list[Any]:
    g = generator()
    return [(torch.randn(2, 8, generator=g), torch.randn(2, 3, generator=g)) for _ in range(count)]


def language_loss(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=batch, labels=batch).loss
    return loss


def next_word_loss(model: nn.Module, batch: Tensor) -> Tensor:
    logits: Tensor = model(batch[:, :-1]).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def square_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    outputs: Tensor = model(batch[0]).float()
    return nn.functional.mse_loss(outputs, batch[1])


def is_experts(module: nn.Module) -> bool:
    return isinstance(module, Experts)


@dataclass(frozen=True)
class Case:
    """A model and its training.

    ``needs``: a library. ``units``: the modules that stage 3 gathers as a whole. ``buffer_dtype``: in bf16; torch's
    batch norm has its statistics in the dtype of its weights.
    """

    build: Callable[[], nn.Module]
    batches: Callable[[int], list[Any]]
    loss_of: Callable[[nn.Module, Any], Tensor]
    needs: str = "torch"
    units: Callable[[nn.Module], bool] | None = None
    buffer_dtype: torch.dtype | None = None

    def precision(self, name: str) -> MixedPrecision | None:
        return MixedPrecision(torch.bfloat16, buffer_dtype=self.buffer_dtype) if name == "bf16" else None

    def model(self) -> nn.Module:
        return seeded(5, self.build)


COUNT = 8  # micro-batches: four steps
CASES = {
    "GPT-2": Case(gpt2, tokens, language_loss, "transformers"),
    "Llama": Case(llama, tokens, language_loss, "transformers"),
    "convolutions with batch norm": Case(Convolutions, images, square_loss, buffer_dtype=torch.bfloat16),
    "nn.Transformer, tied": Case(TiedTransformer, tokens, next_word_loss),
    "low-rank adapters": Case(adapted, wide, square_loss),
    "mixture of experts": Case(Mixture, few_tokens, square_loss, units=is_experts),
}


def train_case(group: dist.ProcessGroup, rank: int, name: str, precision: str) -> list[State]:
    """Return the model's state after training, at each stage."""
    case = CASES[name]
    states = []
    for stage in STAGES:
        model = case.model()
        optimizer = ZeroOptimizer(
            model,
            torch.optim.AdamW,
            lr=1e-2,
            stage=stage,
            process_group=group,
            bucket_cap_mb=0.005,
            mixed_precision=case.precision(precision),
            units=case.units if stage == 3 else None,
        )
        for batch in case.batches(COUNT)[rank::WORLD_SIZE]:
            case.loss_of(model, batch).backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.broadcast_buffers()
        optimizer.check_replicas()
        optimizer.close()
        states.append(state_of(model))
    return states


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", CASES)
def test_a_model_trains_the_bits_of_the_plain_loop_at_every_stage(gloo: GlooPool, name: str, precision: str) -> None:
    """Compares parameters and buffers. Buffers, here the statistics of batch norm, are those of rank 0 on all ranks."""
    case = CASES[name]
    pytest.importorskip(case.needs)
    plain = case.model()
    before = state_of(plain)
    PlainLoop(case.loss_of, precision=case.precision(precision)).run(plain, case.batches(COUNT))
    expected = {name: value for name, value in state_of(plain).items() if name in dict(plain.named_parameters())}
    assert any(not torch.equal(before[name].to(value.dtype), value) for name, value in expected.items())
    first, second = gloo.run(train_case, name, precision, limit=200)
    for stage, (ours, others) in enumerate(zip(first, second, strict=True)):
        assert_same_state(ours, others, f"stage {stage}, both ranks")
        assert_same_state({name: ours[name] for name in expected}, expected, f"stage {stage}")


def test_experts_go_unused_on_one_rank_and_on_both() -> None:
    """Shows that the case covers this."""
    case = CASES["mixture of experts"]
    model: Any = case.model()
    used: set[int] = set()
    for number, expert in enumerate(model.first.experts):
        expert.register_forward_hook(lambda *_, number=number: used.add(number))
    by_step = []
    for batch in case.batches(COUNT):
        used.clear()
        model(batch[0])
        by_step.append(frozenset(used))
    pairs = list(zip(by_step[::2], by_step[1::2], strict=True))
    assert any(mine != others for mine, others in pairs)
    assert any(len(mine | others) < 4 for mine, others in pairs)


def held_by_adapters(group: dist.ProcessGroup, rank: int) -> list[tuple[int, int]]:
    """Return the bytes of gradients after a backward and of states after a step, at each stage."""
    found = []
    for stage in STAGES:
        model = CASES["low-rank adapters"].model()
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=stage, process_group=group)
        for batch in wide(2 * WORLD_SIZE)[rank::WORLD_SIZE]:
            optimizer.zero_grad()
            square_loss(model, batch).backward()
            gradients = optimizer.describe().bytes["gradients"]
            optimizer.step()
        found.append((gradients, optimizer.describe().bytes["optimizer"]))
        optimizer.close()
    return found


def test_what_is_frozen_costs_neither_gradients_nor_states(gloo: GlooPool) -> None:
    model = CASES["low-rank adapters"].model()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained < 0.01 * sum(p.numel() for p in model.parameters())
    shard = trained // WORLD_SIZE
    expected = {0: (4 * trained + 4 * shard, 8 * trained), 1: (4 * trained, 8 * shard)}
    slack = 64 * 12  # for the alignment of cuts, and a step count for each run
    for by_stage in gloo.run(held_by_adapters):
        for stage, held in enumerate(by_stage):
            for nbytes, formula in zip(held, expected.get(stage, (4 * shard, 8 * shard)), strict=True):
                assert formula - slack <= nbytes <= formula + slack, (stage, held)


# -- schedulers --------------------------------------------------------------------------------------------------------


def linear(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    from transformers import get_linear_schedule_with_warmup

    return get_linear_schedule_with_warmup(optimizer, 1, 5)


def cosine(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    from transformers import get_cosine_schedule_with_warmup

    return get_cosine_schedule_with_warmup(optimizer, 1, 5)


def in_sequence(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    first, then = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.5)
    return lr_scheduler.SequentialLR(optimizer, [first, then], [2])


SCHEDULERS: dict[str, SchedulerOf] = {
    "constant": constant,
    "linear with warm-up": linear,
    "cosine with warm-up": cosine,
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 4),
    "CyclicLR, momentum too": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 1e-3, 1e-2, step_size_up=2),
    "SequentialLR": in_sequence,
}


def train_scheduled(group: dist.ProcessGroup, rank: int, name: str) -> list[State]:
    states = []
    for stage in STAGES:
        model = seeded(5, network)
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, lr=1e-2, stage=stage, process_group=group)
        scheduler = SCHEDULERS[name](optimizer)
        for batch in even(COUNT)[rank::WORLD_SIZE]:
            square_loss(model, batch).backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        optimizer.close()
        states.append(state_of(model))
    return states


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_takes_the_optimizer_as_it_is(gloo: GlooPool, name: str) -> None:
    if "warm-up" in name:
        pytest.importorskip("transformers")
    plain = seeded(5, network)
    PlainLoop(scheduler=SCHEDULERS[name]).run(plain, even(COUNT))
    for by_stage in gloo.run(train_scheduled, name, limit=200):
        for stage, state in enumerate(by_stage):
            assert_same_state(state, state_of(plain), f"stage {stage}")


# -- a collection of optimizers ----------------------------------------------------------------------------------------


class Shapes(nn.Module):
    """A model with parameters of no, one, two and four dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.kernels = nn.Conv2d(1, 6, 3)
        self.head = nn.Linear(6 * 4 * 4, 37)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.kernels(images)).flatten(1)) * self.scale
        return found


NOT_ELEMENTWISE = ("LARS", "Ranger", "SM3", "SOAP", "MARS", "AdaNorm", "AdamP")
TAKES_A_MINUTE = ("Kron", "SpectralSphere")  # they compile for a minute, and are then refused
RATE = {"lr": 1e-2}


@pytest.mark.parametrize("name", NOT_ELEMENTWISE)
def test_a_class_that_treats_shapes_differently_is_not_cut_into_pieces(name: str) -> None:
    collection = pytest.importorskip("pytorch_optimizer")
    with pytest.raises(ValueError, match=f"{name} is not element-wise"):
        ZeroOptimizer(seeded(5, Shapes), getattr(collection, name), process_group=solo(), partition="element", **RATE)


@pytest.mark.long
def test_every_class_of_a_collection_is_refused_or_trains_the_bits_of_the_plain_loop() -> None:
    collection = pytest.importorskip("pytorch_optimizer")
    found = {name: getattr(collection, name) for name in dir(collection) if name not in TAKES_A_MINUTE}
    verdicts: dict[str, str] = {}
    for name, cls in found.items():
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer):
            verdicts[name] = verdict_on(cls)
    counted = list(verdicts.values())
    assert {*counted} == {"refused", "same bits", "needs other arguments"}, verdicts
    assert counted.count("same bits") > 90  # 93 in pytorch_optimizer 4.1, 39 of these with an owner for each parameter
    assert counted.count("refused") < 20  # 16, among them those that look at all parameters together
    together = {"DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan", "DAdaptLion", "DAdaptSGD", "Prodigy"}
    assert {verdicts[name] for name in together} == {"refused"}


def verdict_on(cls: type[torch.optim.Optimizer]) -> str:
    """Train with a class that needs only a rate, on two ranks at stages 2 and 3; return the outcome."""
    count = 15 * WORLD_SIZE
    generator = torch.Generator().manual_seed(1)
    images = [torch.randn(4, 1, 6, 6, generator=generator) for _ in range(count)]

    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    plain = seeded(5, Shapes)
    try:
        optimizer = cls(plain.parameters(), **RATE)
        for step in range(count // WORLD_SIZE):
            plain_step(plain, optimizer, loss_of, images[step * WORLD_SIZE :][:WORLD_SIZE], WORLD_SIZE)
            optimizer.zero_grad()
    except Exception:
        return "needs other arguments"
    for stage in (2, 3):
        models = [seeded(5, Shapes) for _ in range(WORLD_SIZE)]

        def train(transport: Transport, stage: int = stage, models: list[nn.Module] = models) -> str:
            model = models[transport.rank]
            try:
                ours = ZeroOptimizer(model, cls, stage=stage, process_group=transport, bucket_cap_mb=2e-3, **RATE)
            except ValueError as error:
                return "refused" if "cannot be sharded" in str(error) or "refuses" in str(error) else str(error)
            for batch in images[transport.rank :: WORLD_SIZE]:
                loss_of(model, batch).backward()
                ours.step()
                ours.zero_grad()
            ours.close()
            return "taken"

        told = on_threads(WORLD_SIZE, train)
        if told != ["taken"] * WORLD_SIZE:
            return told[0]
        for model in models:
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                if not torch.equal(bits(ours), bits(theirs)):
                    return "other bits"
    return "same bits"


# -- recipes -----------------------------------------------------------------------------------------------------------


def run_recipe(started: dict[str, Any], heading: str) -> list[State]:
    """Return the trained parameters after a block that creates an optimizer, at each stage."""
    states = []
    inputs, targets = (torch.cat(parts) for parts in zip(*even(COUNT), strict=True))
    for stage in STAGES:
        names = {name: value for name, value in started.items() if not name.startswith("__")}
        names |= {
            "stage": stage,
            "device": "cpu",
            "dataset": torch.utils.data.TensorDataset(inputs, targets),
            "model": seeded(5, network),
            "loss_fn": nn.functional.mse_loss,
        }
        exec(code_of(heading), names)
        names["optimizer"].check_replicas()
        names["optimizer"].close()
        states.append(state_of(names["model"]))
    return states


def halved(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss as accelerate divides it for each of two accumulated micro-batches."""
    return autocast_loss(model, batch) / 2


def accelerate(started: dict[str, Any], _: Path) -> list[State]:
    return run_recipe(started, "accelerate")


def accelerate_accumulates(started: dict[str, Any], _: Path) -> list[State]:
    return run_recipe(started, "accelerate with autocast and accumulation")


def fabric(started: dict[str, Any], _: Path) -> list[State]:
    return run_recipe(started, "Fabric")


def fabric_strategy(started: dict[str, Any], _: Path) -> list[State]:
    return run_recipe(started, "Fabric with a strategy")


RECIPES = {
    "accelerate": ("accelerate", accelerate, PlainLoop()),
    "accelerate with autocast and accumulation": (
        "accelerate",
        accelerate_accumulates,
        PlainLoop(halved, together=4, divisor=lambda _: WORLD_SIZE),
    ),
    "Fabric": ("lightning_fabric", fabric, PlainLoop(autocast_loss)),
    "Fabric with a strategy": ("lightning_fabric", fabric_strategy, PlainLoop(autocast_loss)),
}


def test_every_recipe_is_run() -> None:
    folders = ("From a transformers folder", "A transformers model without memory", "To a transformers folder")
    assert {*RECIPES, *folders, "Trainer", "Lightning's Trainer"} == set(ECOSYSTEM)
    assert all(len(inputs) == SAMPLES for inputs, _ in even(COUNT))  # the blocks' batch_size
    assert all("batch_size=4" in BLOCKS[heading] for heading in RECIPES)


@pytest.mark.parametrize("heading", RECIPES)
def test_a_recipe_trains_the_bits_of_the_plain_loop_at_every_stage(tmp_path: Path, heading: str) -> None:
    library, program, loop = RECIPES[heading]
    pytest.importorskip(library)
    plain = seeded(5, network)
    loop.run(plain, even(COUNT))
    states = launch(f"{__name__}:{program.__name__}", tmp_path)
    assert len(states) == len(STAGES)
    for stage, state in enumerate(states):
        assert_same_state(state, state_of(plain), f"stage {stage}")


def lightning(started: dict[str, Any], folder: Path) -> list[Any]:
    """Fit two epochs at each stage, save, and fit a third one from there with another model and trainer.

    Return for each stage: the inputs in the order of the micro-batches, the saved file, the state after three epochs,
    and the loss as measured after two epochs, and again when the saved weights were loaded into the trained model.
    """
    os.chdir(folder)
    inputs, targets = (torch.cat(parts) for parts in zip(*even(COUNT), strict=True))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=SAMPLES)
    results = []
    for stage in STAGES:
        batches: list[dict[str, Tensor]] = []
        names = {name: value for name, value in started.items() if not name.startswith("__")}
        names |= {"stage": stage, "device": "cpu", "loader": loader, "loss_fn": nn.functional.mse_loss}

        class Noting(nn.Sequential):
            def forward(self, x: Tensor, batches: list[dict[str, Tensor]] = batches) -> Any:
                batches.extend([{"inputs": x.clone()}] * torch.is_grad_enabled())
                return super().forward(x)

        names["model"] = seeded(5, lambda: Noting(*network()))
        exec(code_of("Lightning's Trainer"), names)
        path = str(folder / f"stage-{stage}.ckpt")
        names["trainer"].save_checkpoint(path)
        measured = [names["trainer"].validate(names["module"], loader)]

        names["model"] = seeded(6, lambda: Noting(*network()))
        later = names["Module"]()
        trainer = names["pl"].Trainer(
            accelerator="cpu", devices=WORLD_SIZE, strategy=names["ZeroStrategy"](), gradient_clip_val=1.0, max_epochs=3
        )
        trainer.fit(later, loader, loader, ckpt_path=path)
        trainer.strategy.optimizers[0].check_replicas()
        with trainer.strategy.gathered():
            state = state_of(names["model"])
        measured.append(trainer.validate(later, loader, ckpt_path=path))
        results.append((by_micro_batch(batches), torch.load(path, weights_only=False), state, measured))
    return results


def test_lightnings_trainer_trains_the_bits_of_the_plain_loop_validates_saves_and_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    target_of = {tuple(row.tolist()): target for x, y in even(COUNT) for row, target in zip(x, y, strict=True)}
    losses = set()
    for stage, (batches, saved, state, measured) in enumerate(launch(f"{__name__}:lightning", tmp_path, limit=250)):
        assert len(batches) == 3 * COUNT
        pairs = [(x["inputs"], torch.stack([target_of[tuple(row.tolist())] for row in x["inputs"]])) for x in batches]
        plain = seeded(5, network)
        optimizer = PlainLoop().run(plain, pairs[: 2 * COUNT])
        weights = {name.removeprefix("model."): value for name, value in saved["state_dict"].items()}
        assert_same_state(weights, state_of(plain), f"stage {stage}, saved")
        assert_same_states(saved["optimizer_states"][0], optimizer.state_dict())
        PlainLoop(optimizer=optimizer).run(plain, pairs[2 * COUNT :])
        assert_same_state(state, state_of(plain), f"stage {stage}, from a checkpoint")
        losses |= {loss["loss"] for each in measured for loss in each}
    assert len(losses) == 1


def come_and_leave(started: dict[str, Any], folder: Path) -> list[tuple[str, State]]:
    """Train what `save_pretrained` wrote, leave for a folder of transformers, and come back from there at each stage.

    Return the folder of each checkpoint, and the state of the model that came back.
    """
    results = []
    for stage in STAGES:
        names = {name: value for name, value in started.items() if not name.startswith("__")}
        names |= {"stage": stage, "path": str(folder / "origin"), "checkpoint": str(folder / f"stage-{stage}")}
        exec(code_of("From a transformers folder"), names)
        for batch in tokens(4)[names["rank"] :: WORLD_SIZE]:
            language_loss(names["model"], batch).backward()
            names["optimizer"].step()
            names["optimizer"].zero_grad()
        exec(code_of("To a transformers folder"), names)
        names["optimizer"].close()
        assert_same_state(state_of(names["whole"]), state_of(names["model"]), "the folder that was left behind")

        names["path"] = f"{names['checkpoint']}/model"
        exec(code_of("From a transformers folder"), names)
        assert names["model"].training
        names["optimizer"].close()
        results.append((names["checkpoint"], state_of(names["model"])))
    return results


def test_training_comes_from_a_transformers_folder_and_leaves_one(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    built: Any = seeded(5, gpt2)  # with tied embeddings
    built.save_pretrained(tmp_path / "origin")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "origin")
    plain.train()
    PlainLoop(language_loss, max_norm=float("inf")).run(plain, tokens(4))
    contents = set()
    for stage, (path, state) in enumerate(launch(f"{__name__}:come_and_leave", tmp_path)):
        assert_same_state(state, state_of(plain), f"stage {stage}")
        checkpoint = open_checkpoint(path)
        checkpoint.verify()
        contents.add(checkpoint.content)
        _, loading = transformers.AutoModelForCausalLM.from_pretrained(f"{path}/model", output_loading_info=True)
        assert not any(loading.values()), loading
        for name in ("config.json", "generation_config.json"):
            assert (checkpoint.path / "model" / name).read_bytes() == (tmp_path / "origin" / name).read_bytes()
    assert len(contents) == 1


DATASET = [{"input_ids": row, "labels": row} for row in torch.cat(tokens(8))]


def training_arguments(folder: Path, **others: Any) -> Any:
    from transformers import TrainingArguments

    given: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "num_train_epochs": 2, "learning_rate": 1e-2, "warmup_steps": 1, "max_grad_norm": 0.5, "weight_decay": 0.1,
        "adam_beta2": 0.95, "use_cpu": True, "report_to": [], "save_strategy": "no", "logging_strategy": "no",
        "disable_tqdm": True,
    }  # fmt: skip
    return TrainingArguments(**{**given, **others})


def trainer_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that Trainer builds with these arguments: no decay of biases and norms, fused."""
    wide = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    rest = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": wide, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True)


def trainer_names(started: dict[str, Any], stage: int, arguments: Any) -> dict[str, Any]:
    """Return the variables of the block."""
    names = {name: value for name, value in started.items() if not name.startswith("__")}
    return {**names, "stage": stage, "dataset": DATASET, "args": arguments, "model": seeded(5, gpt2)}


FAMILIES = {"gpt2": gpt2, "llama": llama}  # the first has tied embeddings, the second buffers that no file has


def without_memory(started: dict[str, Any], folder: Path) -> list[tuple[str, int, State]]:
    """Train models of the folders, which were built on the meta device, at each stage; return their states."""
    results = []
    for stage in STAGES:
        for name in FAMILIES:
            names = {key: value for key, value in started.items() if not key.startswith("__")}
            names |= {"stage": stage, "path": folder / name}
            exec(code_of("A transformers model without memory"), names)
            for batch in tokens(4)[names["rank"] :: WORLD_SIZE]:
                language_loss(names["model"], batch).backward()
                names["optimizer"].step()
                names["optimizer"].zero_grad()
            names["optimizer"].check_replicas()
            names["optimizer"].close()
            results.append((name, stage, state_of(names["model"])))
    return results


def test_a_transformers_model_without_memory_trains_as_one_with_memory(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    expected = {}
    for name, build in FAMILIES.items():
        built: Any = seeded(5, build)
        built.save_pretrained(tmp_path / name)
        plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        plain.train()
        PlainLoop(language_loss, max_norm=float("inf")).run(plain, tokens(4))
        expected[name] = state_of(plain)
    results = launch(f"{__name__}:without_memory", tmp_path)
    assert len(results) == len(STAGES) * len(FAMILIES)
    for name, stage, state in results:
        assert_same_state(state, expected[name], f"{name}, stage {stage}")


def train_with_trainer(started: dict[str, Any], folder: Path) -> list[Any]:
    """Train at each stage, and train on from the checkpoint at half the steps.

    Return for each stage: the model's inputs in the order of the micro-batches, its state after either training, and
    the evaluation loss.
    """
    results = []
    for stage in STAGES:
        arguments = training_arguments(folder / f"stage-{stage}", save_strategy="steps", save_steps=2)
        names = trainer_names(started, stage, arguments)
        calls: list[dict[str, Tensor]] = []
        handle = note_inputs(names["model"], calls)
        exec(code_of("Trainer"), names)
        handle.remove()
        loss = names["trainer"].evaluate(DATASET)["eval_loss"]
        names["trainer"].zero.close()

        later = names["ZeroTrainer"](model=seeded(6, gpt2), args=arguments, train_dataset=DATASET)
        later.train(resume_from_checkpoint=str(folder / f"stage-{stage}" / "checkpoint-2"))
        later.zero.close()
        results.append((by_micro_batch(calls), state_of(names["model"]), state_of(later.model), loss))
    return results


def note_inputs(model: nn.Module, calls: list[dict[str, Tensor]]) -> Any:
    """Append the tensors of each call to ``calls``. Return the hook's handle."""

    def note(_: nn.Module, __: Any, given: dict[str, Any]) -> None:
        calls.append({name: value.clone() for name, value in given.items() if isinstance(value, Tensor)})

    return model.register_forward_pre_hook(note, with_kwargs=True)


def by_micro_batch(calls: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Return the calls of all ranks, in the order of the micro-batches."""
    by_rank: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(by_rank, calls)
    return [call for calls_of_all in zip(*by_rank, strict=True) for call in calls_of_all]


def test_trainer_trains_the_bits_of_the_plain_loop_saves_and_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    def loss_of(model: nn.Module, call: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model(**call).loss * WORLD_SIZE  # as Trainer scales it
        return loss

    losses = set()
    results = launch(f"{__name__}:train_with_trainer", tmp_path, limit=250)
    for stage, (calls, state, resumed, loss) in enumerate(results):
        assert len(calls) == 16
        plain = plain_trainer(loss_of, calls)
        assert_same_state(state, state_of(plain), f"stage {stage}")
        assert_same_state(resumed, state_of(plain), f"stage {stage}, from a checkpoint")
        losses.add(loss)
    assert len(losses) == 1


def train_in_16_bits_and_compiled(started: dict[str, Any], folder: Path) -> list[Any]:
    """Return, for each stage and argument, the model's inputs and its state after training.

    The model is compiled as a whole, which at stage 3 makes another graph: it only has to train there.
    """
    results = []
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    for stage, changes in [*((stage, {"bf16": True}) for stage in STAGES), (2, compiled), (3, compiled)]:
        names = trainer_names(started, stage, training_arguments(folder / f"stage-{stage}", **changes))
        calls: list[dict[str, Tensor]] = []
        if changes is not compiled:
            note_inputs(names["model"], calls)
        exec(code_of("Trainer"), names)
        names["trainer"].zero.check_replicas()
        names["trainer"].zero.close()
        results.append((stage, by_micro_batch(calls), state_of(names["model"])))
    return results


def test_trainers_bf16_and_torch_compile_are_those_of_the_plain_loop(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    def in_16_bits(model: nn.Module, call: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss: Tensor = model(**call).loss
        return loss.float() * WORLD_SIZE

    compiled: dict[nn.Module, Any] = {}

    def compiled_loss(model: nn.Module, call: dict[str, Tensor]) -> Tensor:
        if model not in compiled:
            compiled[model] = torch.compile(model, backend="aot_eager")
        loss: Tensor = compiled[model](**call).loss * WORLD_SIZE
        return loss

    *of_bf16, of_compiled, _ = launch(f"{__name__}:train_in_16_bits_and_compiled", tmp_path, limit=280)
    inputs = of_bf16[0][1]
    expected = state_of(plain_trainer(in_16_bits, inputs))
    for stage, calls, state in of_bf16:
        assert all(torch.equal(a, b) for a, b in zip(calls[-1].values(), inputs[-1].values(), strict=True))
        assert_same_state(state, expected, f"stage {stage}, bf16")
    assert_same_state(of_compiled[2], state_of(plain_trainer(compiled_loss, inputs)), "compiled")


def trainer_class(names: dict[str, Any]) -> Any:
    """Return the block's class, without the training behind it."""
    exec(BLOCKS["Trainer"].partition("\ntrainer = ")[0], names)
    return names["ZeroTrainer"]


def end_with_the_best(started: dict[str, Any], folder: Path) -> list[Any]:
    """Train at each stage until early stopping. Return the steps, the best checkpoint, and the model's state.

    A larger loss counts as better: the first checkpoint is the best one, and training stops two steps later.
    """
    from transformers import EarlyStoppingCallback

    results = []
    for stage in STAGES:
        arguments = training_arguments(
            folder / f"stage-{stage}", save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1,
            load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=True,
        )  # fmt: skip
        names = trainer_names(started, stage, arguments)
        trainer = trainer_class(names)(
            model=names["model"],
            args=arguments,
            train_dataset=DATASET,
            eval_dataset=DATASET,
            callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
        )
        trainer.train()
        trainer.zero.check_replicas()
        trainer.zero.close()
        results.append((trainer.state.global_step, trainer.state.best_model_checkpoint, state_of(names["model"])))
    return results


def test_trainer_stops_early_and_ends_with_the_best_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    for stage, (steps, best, state) in enumerate(launch(f"{__name__}:end_with_the_best", tmp_path, limit=250)):
        assert (steps, best) == (3, str(tmp_path / f"stage-{stage}" / "checkpoint-1"))
        later = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"stage-{stage}" / "checkpoint-3")
        assert_same_state(state, state_of(transformers.AutoModelForCausalLM.from_pretrained(best)), f"stage {stage}")
        assert any(not torch.equal(state[name], value) for name, value in state_of(later).items())


@pytest.mark.parametrize("name", ["fp16", "fsdp", "deepspeed"])
def test_an_argument_that_the_trainer_of_the_guide_cannot_do_is_an_error(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    arguments = training_arguments(tmp_path)
    setattr(arguments, name, True)
    trainer = trainer_class(trainer_names({"torch": torch}, 3, arguments))
    with pytest.raises(ValueError, match=f"ZeroTrainer does not take {name}"):
        trainer(model=seeded(5, gpt2), args=arguments, train_dataset=DATASET)


def plain_trainer(loss_of: LossOf, calls: list[Any]) -> nn.Module:
    """Train as Trainer does: four micro-batches a step, and the schedule of four steps."""
    from transformers import get_linear_schedule_with_warmup

    def schedule(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        found: lr_scheduler.LRScheduler = get_linear_schedule_with_warmup(optimizer, 1, 4)
        return found

    model: Any = seeded(5, gpt2)
    model.config.use_cache = False  # as Trainer sets it; with a cache, attention differs in the last bits
    loop = PlainLoop(
        loss_of,
        together=4,
        divisor=lambda _: WORLD_SIZE,
        scheduler=schedule,
        max_norm=0.5,
        optimizer=trainer_optimizer(model),
    )
    loop.run(model, calls)
    return model  # type: ignore[no-any-return]


# -- limits that the guide names ---------------------------------------------------------------------------------------


def error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except RuntimeError as error:
        return str(error)
    return ""


def refused(stage: int, wrap: Callable[[nn.Module], nn.Module], clip: Callable[[nn.Module, Any], object]) -> list[str]:
    """Return the error of a wrapped model's first backward, and that of a clip."""
    inputs, targets = even(1)[0]

    def train() -> None:
        model = seeded(5, network)
        wrapped = wrap(model)
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=stage)
        nn.functional.mse_loss(wrapped(inputs), targets).backward()
        optimizer.step()

    def clip_by() -> None:
        model = seeded(5, network)
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=stage)
        nn.functional.mse_loss(model(inputs), targets).backward()
        clip(model, optimizer)

    return [error_of(train), error_of(clip_by)]


def refused_to_accelerate(_: dict[str, Any], folder: Path) -> list[Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    results = []
    for stage in STAGES:
        model = seeded(5, network)
        optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=stage)
        prepared = error_of(lambda optimizer=optimizer: accelerator.prepare(optimizer))  # type: ignore[misc]
        with optimizer.gathered():
            accelerator.save_model(model, str(folder / f"saved-{stage}"))
        accelerator.wait_for_everyone()
        both = refused(stage, accelerator.prepare_model, lambda m, _: accelerator.clip_grad_norm_(m.parameters(), 1.0))
        results.append((*both, prepared))
    return results


def refused_to_fabric(_: dict[str, Any], __: Path) -> list[Any]:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=WORLD_SIZE)
    fabric.launch()
    return [
        refused(stage, fabric.setup_module, lambda m, o: fabric.clip_gradients(m, o, max_norm=1.0)) for stage in STAGES
    ]


@pytest.mark.parametrize(("library", "program"), [("accelerate", "accelerate"), ("lightning_fabric", "fabric")])
def test_what_the_guide_says_does_not_work_is_an_error(tmp_path: Path, library: str, program: str) -> None:
    pytest.importorskip(library)
    for stage, (wrapped, clipped, *prepared) in enumerate(launch(f"{__name__}:refused_to_{program}", tmp_path)):
        assert "does not hold the gradient" in wrapped, stage
        assert "optimizer.clip_grad_norm_" in clipped or stage == 0
        assert all("consolidate_state_dict" in message for message in prepared)


def test_accelerate_leaves_parameters_out_of_what_it_saves(tmp_path: Path) -> None:
    """The guide warns of this. When this test fails, the warning can go."""
    pytest.importorskip("accelerate")
    from safetensors.torch import load_file

    launch(f"{__name__}:refused_to_accelerate", tmp_path)
    for stage in STAGES:
        assert len(load_file(tmp_path / f"saved-{stage}" / "model.safetensors")) < len(list(network().parameters()))


# -- classes that keep their states in 8 bits --------------------------------------------------------------------------

TOGETHER = 6  # micro-batches of a step, shared by the ranks


def blocks_of_8_bits() -> nn.Module:
    """Return a model with matrices that are large enough for states in 8 bits, and vectors that are not."""
    return seeded(3, lambda: nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)))


def of_8_bits(step: int, micro: int) -> Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(100 * step + micro))


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = model(batch)
    return found.square().mean()


def class_of(library: str, name: str) -> Any:
    return getattr(pytest.importorskip(f"{library}.optim"), name)


def in_8_bits(group: Any, rank: int, library: str, name: str, how: int, steps: range, folder: Path, of: int) -> State:
    """Train on one process: from the checkpoint unless ``steps`` begin with 0, and save one then. ``how``: the stage;
    ``of``: the number of ranks."""
    model = blocks_of_8_bits()
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its steps, for each shape
        optimizer = ZeroOptimizer(
            model, class_of(library, name), stage=how, process_group=group, divisor=TOGETHER, **RATE
        )
        if steps.start:
            load(folder / "saved", optimizer, rng=False)
        for step in steps:
            for micro in range(rank, TOGETHER, of):
                squares(model, of_8_bits(step, micro)).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.consolidate_state_dict(None)
        states = optimizer.state_dict()["state"][0]
        kept = states["state1"].dtype if library == "bitsandbytes" else type(states["exp_avg"])
        assert kept not in (torch.float32, Tensor), "the matrix is too small for states in 8 bits"
        if not steps.start:
            save(folder / "saved", optimizer)
        with optimizer.gathered():
            return state_of(model)


OF_8_BITS = [
    *(("bitsandbytes", name) for name in ("AdamW8bit", "Lion8bit")),
    *(("torchao", name) for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8")),
]


@pytest.mark.filterwarnings("ignore:.*is not element-wise")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("library", "name"), OF_8_BITS)
def test_classes_with_states_in_8_bits_give_the_bits_of_the_plain_loop(
    gloo: GlooPool, library: str, name: str, stage: int, tmp_path: Path
) -> None:
    """Also after a checkpoint, at another stage and number of ranks. On processes: bitsandbytes needs one a rank."""
    plain = blocks_of_8_bits()
    optimizer = class_of(library, name)(plain.parameters(), **RATE)
    expected = []
    with torch.compiler.set_stance("force_eager"):
        for step in range(5):
            plain_step(plain, optimizer, squares, [of_8_bits(step, micro) for micro in range(TOGETHER)], TOGETHER)
            optimizer.zero_grad()
            expected.append(state_of(plain))
    for ranks, how, steps in ((2, stage, range(3)), (3, (stage + 1) % 4, range(3, 5))):
        for found in gloo.run(in_8_bits, library, name, how, steps, tmp_path, ranks, ranks=range(ranks)):
            assert_same_state(found, expected[steps.stop - 1], f"{ranks} ranks")


@pytest.mark.parametrize(("library", "name"), OF_8_BITS)
def test_they_are_refused_where_ranks_would_step_pieces(library: str, name: str) -> None:
    of_blocks = class_of(library, name)
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(ValueError, match=rf"{name} is not element-wise: .*or use \"parameter\""),
    ):
        ZeroOptimizer(blocks_of_8_bits(), of_blocks, process_group=solo(), partition="element", **RATE)


def test_a_class_of_torchao_compiles_its_steps_with_the_bits_of_the_plain_loop() -> None:
    def steps(model: nn.Module, optimizer: Any) -> nn.Module:
        for step in range(2):
            plain_step(model, optimizer, squares, [of_8_bits(step, 0)], 1)
            optimizer.zero_grad()
        return model

    plain, model = blocks_of_8_bits(), blocks_of_8_bits()
    of_blocks = class_of("torchao", "AdamW8bit")
    steps(plain, of_blocks(plain.parameters(), **RATE))
    optimizer = ZeroOptimizer(model, of_blocks, process_group=solo(), partition="parameter", **RATE)
    for step in range(2):
        squares(model, of_8_bits(step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    assert_same_state(state_of(model), state_of(plain), "compiled")
