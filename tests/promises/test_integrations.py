"""Integrations refuse what they cannot obey, convert plain optimizers, and train models that were set up."""

from __future__ import annotations

import copy
import gc
import importlib
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR, LambdaLR
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from collectives import Transport, on_threads
from zero import MicroBatchSampler, MixedPrecision, ZeroOptimizer
from zero.integrations.conversion import Conversions, convert, on_cpu

from ..support.errors import assert_in_order, error_of, is_plain
from ..support.limits import BOUND
from ..support.plain import assert_same_model, assert_same_states
from ..support.refused import REFUSED
from ..support.rows import rows
from ..support.two_modes import ScheduleFree
from ..support.updates import Updates


def trainers() -> Any:
    """Return the integration of transformers. Its import takes seconds, in each process that collects these tests."""
    return importlib.import_module("zero.integrations.transformers")


@pytest.fixture
def accelerator_class() -> Iterator[Any]:
    """Yield `ZeroAccelerator`, and let accelerate forget the process afterwards."""
    state = pytest.importorskip("accelerate.state")
    from zero.integrations.accelerate import ZeroAccelerator

    yield ZeroAccelerator
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def set_up(*models: nn.Module, **options: Any) -> Conversions:
    """Set up models with the options of an integration, X."""
    conversions = Conversions(options, "X", "set it up")
    for model in models:
        conversions.add(model)
    return conversions


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    weights, biases = ([p for p in model.parameters() if (p.dim() > 1) is wide] for wide in (True, False))
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0, "lr": 2e-2}]
    return torch.optim.AdamW(groups, lr=1e-2, amsgrad=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class OfItsFirstGroup(Updates, torch.optim.SGD):
    """Steps with what its first group has."""

    def update(self, p: Any, group: dict[str, Any]) -> None:
        p.add_(p.grad, alpha=-self.param_groups[0]["lr"])


@pytest.mark.parametrize(
    ("plain_of", "stage"),
    [
        (adamw, 2),
        (adamw, 3),
        (lambda model: ScheduleFree(model.parameters(), beta=0.8), 2),
        (lambda model: OfItsFirstGroup(model.parameters(), lr=0.5), 2),
    ],
)
def test_a_plain_optimizer_is_converted_with_its_class_groups_arguments_states_mode_and_schedulers(
    plain_of: Callable[[nn.Module], Any], stage: int
) -> None:
    trained: list[tuple[nn.Module, Any]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a scheduler would warn if its optimizer took no step
        for converts in (False, True):
            model = network()
            optimizer = plain_of(model)
            halving = LambdaLR(optimizer, lambda number: 0.5**number)
            scheduler = ChainedScheduler([halving, ExponentialLR(optimizer, 0.9)], optimizer)
            if isinstance(optimizer, ScheduleFree):
                optimizer.train()
            step(model, optimizer)
            ours = convert(optimizer, model, {"stage": stage}) if converts else optimizer
            for _ in range(3):
                step(model, ours)
                scheduler.step()
            if isinstance(optimizer, ScheduleFree):
                ours.eval()
            trained.append((model, ours))
    (plain, reference), (model, zero) = trained
    assert isinstance(zero, ZeroOptimizer)
    assert_same_states(zero.state_dict(), reference.state_dict())
    zero.close()
    assert_same_model(model, plain)


class Keeping(torch.optim.SGD):
    """Keeps an argument for itself."""

    def __init__(self, params: Any, lr: float = 1e-2, patience: int = 3) -> None:
        super().__init__(params, lr)
        self.patience = patience


def with_a_hook(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = adamw(model)
    optimizer.register_step_post_hook(lambda *_: pytest.fail("the conversion calls a hook"))
    return optimizer


@pytest.mark.parametrize(
    ("plain_of", "words"),
    [
        (lambda _: adamw(network()), "ValueError: … models that were set up do not have all parameters of the AdamW"),
        (ZeroOptimizer, "ValueError: X got stage, and an optimizer that is a ZeroOptimizer already"),
        (lambda model: Keeping(model.parameters()), "TypeError: Keeping does not keep its arguments patience in its"),
        (with_a_hook, "the AdamW has hooks (_optimizer_step_post_hooks), … register them on the Zero"),
    ],
)
def test_what_cannot_be_converted_is_an_error(plain_of: Any, words: str) -> None:
    model = network()
    assert_in_order(words, error_of(lambda: set_up(model, stage=3).convert(plain_of(model))))


def test_a_copied_state_dict_keeps_ties_and_the_versions_by_which_modules_load() -> None:
    """A batch norm without statistics takes a dict without a version for one of before 0.4.1, and adds a count."""
    whole = torch.arange(6.0)
    states = on_cpu({"a": whole[:2], "b": whole[2:], "tied": whole[:2], "none": None})
    assert states["a"] is states["tied"]
    assert len({states[name].untyped_storage().data_ptr() for name in "ab"}) == 2
    assert [states["b"].tolist(), states["none"]] == [[2, 3, 4, 5], None]
    norm = nn.BatchNorm1d(2, track_running_stats=False)
    norm.track_running_stats = True  # as Lightning's BaseFinetuning sets it
    norm.load_state_dict(on_cpu(norm.state_dict()))


def fit_with(arguments: dict[str, Any], optimizers: int = 1, configure: Callable[[Any], Any] = adamw) -> Any:
    """Set up a fit as `Trainer.fit` does, without a process group. Return the strategy."""
    import pytorch_lightning as pl

    from zero.integrations.lightning import ZeroStrategy

    class Module(pl.LightningModule):
        automatic_optimization = optimizers == 1

        def __init__(self) -> None:
            super().__init__()
            self.model = network()

        def training_step(self, *_: Any) -> None: ...

        def configure_optimizers(self) -> Any:
            return [configure(self) for _ in range(optimizers)]

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=ZeroStrategy(), **quiet, **arguments)
    module = Module()
    module.trainer = trainer
    trainer.state.fn = "fit"
    trainer.strategy.connect(module)
    trainer.strategy.setup(trainer)
    return trainer.strategy


@pytest.mark.first(0)
@pytest.mark.parametrize("named", [False, True])
def test_a_checkpoint_of_lightning_names_parameters_if_the_module_did(named: bool) -> None:
    pytest.importorskip("pytorch_lightning")

    def configure(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(list(module.named_parameters()) if named else list(module.parameters()))

    strategy = fit_with(unfreezing(1), configure=configure)  # a callback that has added no group
    (group,) = strategy.optimizer_state(strategy.optimizers[0])["param_groups"]
    assert ("param_names" in group) is named


def unfreezing(groups: int) -> dict[str, Any]:
    """Return a callback that has added param groups to the first two."""
    from pytorch_lightning import callbacks

    class Unfreezing(callbacks.BaseFinetuning):  # type: ignore[misc, name-defined]
        def freeze_before_training(self, pl_module: Any) -> None: ...

    found = Unfreezing()
    found.load_state_dict({"internal_optimizer_metadata": {0: [{}] * groups}})
    return {"callbacks": [found]}


CALLBACKS = {
    "WeightAveraging": "keep a zero.ShardedAverage",
    "EMAWeightAveraging": "keep a zero.ShardedAverage",
    "StochasticWeightAveraging": "keep a zero.ShardedAverage",
    "ModelPruning": "prune the module before fit",
    "BatchSizeFinder": "find the size with one process",
    "LearningRateFinder": "find the rate with one process",
}


def test_what_lightning_and_fabric_ask_for_and_cannot_be_obeyed_is_an_error() -> None:
    pytest.importorskip("pytorch_lightning")
    from pytorch_lightning import callbacks
    from pytorch_lightning.plugins import Precision

    from zero.integrations import fabric, lightning

    needed = {"StochasticWeightAveraging": {"swa_lrs": 0.1}, "ModelPruning": {"pruning_fn": "l1_unstructured"}}
    other = type("Other", (Precision,), {"precision": "transformer-engine"})()
    clips = {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}
    errors = {
        "does not take sync_batchnorm": lambda: fit_with({"sync_batchnorm": True}),
        "clips by norm, not by value": lambda: fit_with(clips),
        "does not take the precision 'transformer-engine'": lambda: fit_with({"plugins": [other]}),
        "takes one optimizer, not 2": lambda: fit_with({}, 2),
        "has param groups that Unfreezing has added: resume from one": lambda: fit_with(unfreezing(3)),
    }
    for name in CALLBACKS:
        if made := getattr(callbacks, name, None):  # this release has it
            given = {"callbacks": [made(**needed.get(name, {}))]}
            errors[f"does not take the callback {name}: … {CALLBACKS[name]}"] = lambda given=given: fit_with(given)
    for words, call in errors.items():
        assert_in_order(f"ValueError: … {words}", error_of(call))
    strategies: list[Any] = [lightning.ZeroStrategy, fabric.ZeroFabricStrategy]
    for strategy in strategies:
        said = error_of(strategy, stage=3, find_unused_parameters=True)
        assert f"TypeError: {strategy.__name__} has no argument find_unused_parameters" in said
    said = error_of(strategies[1]().clip_gradients_value, network(), adamw(network()), 1.0)
    assert "clips by norm, not by value" in said


PLUGINS = ("fsdp_plugin", "deepspeed_plugin", "megatron_lm_plugin", "parallelism_config")


@pytest.mark.parametrize("name", [*PLUGINS, "DistributedDataParallelKwargs", "dynamo_backend", "mixed_precision"])
def test_arguments_of_an_accelerator_that_cannot_be_obeyed_are_errors(accelerator_class: Any, name: str) -> None:
    import accelerate

    others = {"dynamo_backend": {"dynamo_backend": "eager"}, "mixed_precision": {"mixed_precision": "fp16"}}
    others["DistributedDataParallelKwargs"] = {"kwargs_handlers": [accelerate.DistributedDataParallelKwargs()]}
    with pytest.raises(ValueError, match=f"ZeroAccelerator does not take {name}"):
        accelerator_class(cpu=True, stage=3, **others.get(name, {name: object()}))


def clips_while_accumulating(accelerator: Any, model: Any) -> None:
    accelerator.prepare(model, adamw(model))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(2, 3)).sum())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)


def clips_a_part(accelerator: Any, model: Any) -> None:
    accelerator.prepare(model, adamw(model))
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.sync_gradients and accelerator.clip_grad_norm_(model[0].parameters(), 1.0)


def by_rank(data: Any) -> Any:
    return DistributedSampler(data, num_replicas=1, rank=0)


def dealing(size: int | None = 1, **samplers: Any) -> Callable[[Any, Any], object]:
    """Return a call that prepares a loader with a sampler."""
    data: Any = TensorDataset(torch.arange(8))
    return lambda a, _: a.prepare(DataLoader(data, size, **{name: of(data) for name, of in samplers.items()}))


CALLS: dict[str, Callable[[Any, Any], object]] = {  # of an accelerator of two micro-batches a step, and a model
    "ValueError: … set up each model before its optimizer": lambda a, model: a.prepare(adamw(model), model),
    "NotImplementedError: … clips by norm": lambda a, model: a.clip_grad_value_(model.parameters(), 1.0),
    "NotImplementedError: … optimizer.optimizer.join": lambda a, model: a.join_uneven_inputs([model]),
    "RuntimeError: … while gradients are accumulated": clips_while_accumulating,
    "ValueError: … give all of them": clips_a_part,
    "does not take a model that torch.compile returned: prepare the model": lambda a, model: a.prepare(
        torch.compile(model, backend="eager")
    ),
    "'2.bias' of the Sequential … : prepare the optimizer that has it, as in": lambda a, model: a.backward(
        a.prepare(model)(torch.ones(2, 3)).sum()
    ),
    "prepare the optimizer that has it": lambda a, model: a.prepare(model)(torch.ones(2, 3)).sum().backward(),
    "ZeroAccelerator … DistributedSampler has dealt": dealing(2, sampler=by_rank),
    "DistributedSampler has dealt": dealing(batch_sampler=lambda data: BatchSampler(by_rank(data), 2, False)),
    "MicroBatchSampler has dealt": dealing(None, sampler=lambda data: MicroBatchSampler(data, 2, 0, 1)),
    "ZeroAccelerator … is expected": dealing(batch_sampler=lambda data: MicroBatchSampler(data, 2, 1, 2)),
}


@pytest.mark.parametrize("words", CALLS)
def test_calls_of_an_accelerator_that_cannot_be_obeyed_are_errors(accelerator_class: Any, words: str) -> None:
    accelerator = accelerator_class(cpu=True, gradient_accumulation_steps=2)
    assert_in_order(words, error_of(CALLS[words], accelerator, network()))
    backward(accelerator.prepare_model(network(), evaluation_mode=True))


def test_an_accelerator_that_finds_fewer_processes_than_were_started_is_an_error(
    accelerator_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a tracker that asked which process it is, before accelerate was told that there is no GPU."""
    __import__("accelerate").PartialState()
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = "2 processes were started, but accelerate has found 1: … PartialState(cpu="
    assert_in_order(words, error_of(accelerator_class, stage=1))


def test_a_prepared_scheduler_is_held_back_by_a_step_that_its_own_optimizer_skipped(accelerator_class: Any) -> None:
    accelerator = accelerator_class(cpu=True, stage=1)
    models = [network(), network()]
    plain = [adamw(model) for model in models]
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in plain]
    _, _, *prepared = accelerator.prepare(*models, *plain, *schedulers)
    optimizers, schedulers = prepared[:2], prepared[2:]
    before = schedulers[0].get_last_lr()
    optimizers[1]._is_overflow = True  # as after an overflow, which needs a GPU
    for each in schedulers:
        each.step()
    assert [each.get_last_lr() for each in schedulers] == [[rate / 2 for rate in before], before]
    for each in optimizers:
        each.optimizer.close()


def test_a_hook_of_save_state_reads_whole_parameters_at_stage_3(accelerator_class: Any, tmp_path: Path) -> None:
    """As those of diffusers' scripts, which save each model in its own format."""
    accelerator = accelerator_class(cpu=True, stage=3)
    expected, model = network(), network()
    found = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    accelerator.register_save_state_pre_hook(lambda models, *_: found.load_state_dict(models[0].state_dict()))
    _, optimizer = accelerator.prepare(model, adamw(model))
    accelerator.save_state(str(tmp_path))
    assert_same_model(found, expected)
    optimizer.optimizer.close()


def test_free_memory_lets_go_of_the_model_and_its_optimizer(accelerator_class: Any) -> None:
    accelerator = accelerator_class(cpu=True, stage=2)
    model = network()
    model, optimizer = accelerator.prepare(model, adamw(model))
    step(model, optimizer)
    optimizer.optimizer.close()
    alive = [weakref.ref(each) for each in (model, optimizer.optimizer)]
    model, optimizer = accelerator.free_memory(model, optimizer)
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


@pytest.mark.parametrize("row", REFUSED, ids=str)
def test_an_argument_that_cannot_be_obeyed_is_an_error_and_other_values_of_it_are_taken(row: Any) -> None:
    said = error_of(trainers().check_arguments, SimpleNamespace(**{row.argument: row.value}))
    assert said.startswith(f"ValueError: ZeroTrainer does not take TrainingArguments({row.argument}={row.value!r}): ")
    assert row.words in said
    for value in (None, row.taken):
        trainers().check_arguments(SimpleNamespace(**{row.argument: value}))


def test_every_refusal_is_one_of_these() -> None:
    for refusal in trainers().REFUSALS:
        values = [row.value for row in REFUSED if row.argument == refusal.argument]
        assert any(refusal.refuses(value) for value in values), refusal


def chosen_by(plugin: str = "", precision: str = "no") -> Any:
    return SimpleNamespace(state=SimpleNamespace(**{plugin: object()} if plugin else {}), mixed_precision=precision)


def choices(length: int = 7, dispatch: bool | None = None, **changes: Any) -> Any:
    config = SimpleNamespace(dispatch_batches=dispatch)
    args = SimpleNamespace(**{"seed": 1, "data_seed": None, "accelerator_config": config, **changes})
    return trainers().choices_of(args, range(length), "train_dataset")


ALONE = "2 processes were started, but TrainingArguments has found 1: each would train alone"
SEED = (
    "ValueError: ZeroTrainer: TrainingArguments(data_seed=...), by default its seed, is 1 on rank 0 and 2 on rank "
    "2: give all ranks the same arguments and the same whole dataset, of which Trainer deals each rank its part"
)
CHECKS: list[tuple[str, Callable[[], Any], str]] = [
    ("check_process", lambda: SimpleNamespace(n_gpu=1, world_size=2), "nothing"),
    (
        "check_process",
        lambda: SimpleNamespace(n_gpu=4, world_size=1),
        "4 GPUs in one process … torchrun --nproc-per-node 4 S",
    ),
    ("check_process", lambda: SimpleNamespace(n_gpu=0, world_size=1), f"{ALONE} … TrainingArguments(use_cpu=True)"),
    ("check_accelerator", lambda: chosen_by(precision="bf16"), "nothing"),
    *(
        ("check_accelerator", partial(chosen_by, plugin), f"ZeroTrainer does not take Accelerator's {plugin}")
        for plugin in ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin")
    ),
    (
        "check_accelerator",
        lambda: chosen_by(precision="fp8"),
        "ZeroTrainer does not take ACCELERATE_MIXED_PRECISION=fp8",
    ),
    ("check_choices", lambda: [choices(), choices()], "nothing"),
    ("check_choices", lambda: [choices(), choices(seed=2, data_seed=1)], "nothing"),  # other dropout, the same samples
    ("check_choices", lambda: [choices(7, dispatch=True), choices(8, dispatch=True)], "nothing"),  # rank 0 alone reads
    ("check_choices", lambda: [choices(), choices(), choices(seed=2)], SEED),
    ("check_choices", lambda: [choices(), choices(max_steps=5)], "(max_steps=...) is None on rank 0 and 5 on rank 1"),
    (
        "check_choices",
        lambda: [choices(), choices(8)],
        "the length of the train_dataset is 7 on rank 0 and 8 on rank 1",
    ),
]


@pytest.mark.parametrize(("check", "given", "words"), CHECKS)
def test_processes_plugins_and_ranks_that_cannot_be_are_errors(
    check: str, given: Callable[[], Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert_in_order(words, error_of(getattr(trainers(), check), given()))


def unowned(name: str) -> str:
    return f"RuntimeError: X: a backward gave a gradient to {name!r} of the Sequential, and no ZeroOptimizer has it"


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 3)).square().mean().backward()


@pytest.mark.parametrize(("stage", "world_size"), rows([(3, 3), (1, 2)], [(0, 2), (2, 1)]))
def test_a_gradient_that_no_optimizer_averages_is_an_error_on_every_rank(stage: int, world_size: int) -> None:
    def program(transport: Transport) -> list[str]:
        model = network()
        conversions = set_up(model, stage=stage, process_group=transport)

        def refused() -> str:
            said = error_of(backward, model)
            model.zero_grad()
            return said

        found = [refused()]
        optimizer = conversions.convert(torch.optim.AdamW(model[0].parameters()))
        found.append(refused())
        model[2].requires_grad_(False)
        step(model, optimizer)
        model[2].requires_grad_(True)
        found.append(refused())
        optimizer.add_param_group({"params": list(model[2].parameters())})
        step(model, optimizer)
        conversions.close()
        assert is_plain(model)
        return found

    for found in on_threads(world_size, program, timeout=BOUND):
        assert [text[: len(unowned("2.bias"))] for text in found] == [unowned("2.bias")] * 3
        assert "would not average it: set it up. If nothing trains" in found[0]


def test_so_it_is_in_lightning_and_fabric() -> None:
    pytest.importorskip("pytorch_lightning")
    from zero.integrations.fabric import ZeroFabricStrategy

    fabric = ZeroFabricStrategy()
    lightning = fit_with({}, configure=lambda module: torch.optim.AdamW(module.model[0].parameters()))
    for strategy, model in ((fabric, fabric.setup_module(network())), (lightning, lightning.lightning_module.model)):
        words = (
            f"RuntimeError: {type(strategy).__name__}: a backward gave a gradient to ' … and no ZeroOptimizer has it"
        )
        assert_in_order(words, error_of(backward, model))


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_that_are_each_ranks_own_frozen_models_and_plain_ones_need_no_optimizer(stage: int) -> None:
    model, teacher, evaluated, early = (network() for _ in range(4))
    teacher.requires_grad_(False)
    conversions = set_up(model, teacher, early, stage=stage, ignored=iter([model[2]]))
    conversions.add(evaluated, trained=False)
    own = ZeroOptimizer(early, torch.optim.SGD, stage=stage, lr=0.1)  # which the trainer never gets
    optimizer = conversions.convert(torch.optim.AdamW(model[0].parameters()))
    backward(nn.Sequential(model, nn.Linear(2, 3), teacher))
    backward(evaluated)
    backward(early)
    optimizer.close()
    own.close()
    backward(model)  # plain again
    assert is_plain(model)
    conversions.forget()
    assert is_plain(teacher)
    other = set_up(teacher)
    backward(copy.deepcopy(teacher.requires_grad_()))
    del other
    backward(teacher)
    assert is_plain(teacher)


def test_a_model_is_set_up_before_it_has_memory_and_in_inference_mode_and_not_before_it_has_shapes() -> None:
    with torch.device("meta"):
        model = network()
    conversions = set_up(model, param_init_fn=lambda part: part.reset_parameters())
    optimizer = conversions.convert(torch.optim.AdamW(model[0].parameters()))
    assert error_of(backward, model).startswith(unowned("2.bias"))
    optimizer.close()
    with torch.inference_mode():
        conversions.add(network().requires_grad_(False))
    with pytest.raises(ValueError, match="X: 'weight' of the LazyLinear is not initialised yet"):
        conversions.add(nn.LazyLinear(2))
    quantised = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.uint8), requires_grad=False)])
    conversions.add(quantised)
    assert not quantised[0]._post_accumulate_grad_hooks, "whole numbers are not watched"


@pytest.mark.parametrize("stage", [2, 3])
def test_one_optimizer_trains_two_models(stage: int) -> None:
    trained = []
    for converts in (False, True):
        models = nn.ModuleList([network(), network()])
        plain = torch.optim.AdamW([*models[1].parameters(), *models[0].parameters()], lr=1e-2)
        optimizer = set_up(*models, stage=stage).convert(plain) if converts else plain
        for _ in range(2):
            (models[0](torch.ones(2, 3)) * models[1](torch.ones(2, 3))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append((models, optimizer.state_dict()))
    optimizer.close()
    assert_same_model(*(models for models, _ in trained))
    assert_same_states(*(states for _, states in trained))


def test_one_optimizer_of_two_models_takes_no_precision_by_names() -> None:
    bf16 = MixedPrecision(torch.bfloat16)
    for precision in (bf16, {"*": bf16, "0": bf16}, lambda name, module: bf16):
        models = network(), network()
        conversions = set_up(*models, mixed_precision=precision)
        both = [parameter for model in models for parameter in model.parameters()]
        if precision is bf16:
            assert conversions.convert(torch.optim.AdamW(both)) is conversions.of(both)
        else:
            with pytest.raises(ValueError, match="give one MixedPrecision for all of them, or set up"):
                conversions.convert(torch.optim.AdamW(both))
            conversions.convert(torch.optim.AdamW(models[0].parameters()))
        conversions.close()


def test_a_loader_of_a_sampler_that_has_dealt_stays_as_it_is(accelerator_class: Any) -> None:
    from accelerate import skip_first_batches

    data = TensorDataset(torch.arange(14))
    samplers = [MicroBatchSampler(data, 2, 0, 1) for _ in range(2)]
    accelerator = accelerator_class(cpu=True)
    plain, prepared = (DataLoader(data, batch_sampler=sampler) for sampler in samplers)
    prepared = accelerator.prepare(prepared)
    assert accelerator.prepare(prepared) is prepared

    def dealt(loader: Any) -> list[list[int]]:
        return [batch.tolist() for (batch,) in loader]

    for set_epoch, epoch in ((None, 0), (None, 0), (samplers[1].set_epoch, 5), (prepared.set_epoch, 3)):
        for set_it in (samplers[0].set_epoch, set_epoch) if set_epoch else ():
            set_it(epoch)  # one whose epoch is not set deals the same one again
        assert dealt(prepared) == dealt(plain)
    for sampler in samplers:
        sampler.set_epoch(2, start=3)
    assert len(prepared) == 4
    assert dealt(skip_first_batches(prepared, 1)) == dealt(plain)[1:]
    whole = [sample for (batch,) in prepared for sample in accelerator.gather_for_metrics(batch).tolist()]
    assert len(whole) == 8  # none of the last is taken for a repeated one
