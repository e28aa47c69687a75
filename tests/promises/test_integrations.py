"""Integrations refuse what they cannot obey, convert plain optimizers, and train models that were set up."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
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
from zero.integrations.transformers import (
    REFUSALS,
    check_accelerator,
    check_arguments,
    check_choices,
    check_process,
    check_ranks,
    choices_of,
)

from ..support.errors import assert_in_order, error_of, is_plain
from ..support.limits import BOUND
from ..support.plain import assert_same_model, assert_same_states
from ..support.refused import REFUSED
from ..support.rows import rows
from ..support.two_modes import ScheduleFree


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


class OfItsFirstGroup(torch.optim.SGD):
    """Steps with what its first group has."""

    def step(self, closure: Any = None) -> Any:
        first = self.param_groups[0]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-first["lr"])


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
    ("plain_of", "error", "words"),
    [
        (lambda _: adamw(network()), ValueError, "models that were set up do not have all parameters of the AdamW"),
        (ZeroOptimizer, ValueError, "X got stage, and an optimizer that is a ZeroOptimizer already"),
        (lambda model: Keeping(model.parameters()), TypeError, "Keeping does not keep its arguments patience in its"),
        (with_a_hook, ValueError, r"the AdamW has hooks \(_optimizer_step_post_hooks\), .* register them on the Zero"),
    ],
)
def test_what_cannot_be_converted_is_an_error(plain_of: Any, error: type[Exception], words: str) -> None:
    model = network()
    with pytest.raises(error, match=words):
        set_up(model, stage=3).convert(plain_of(model))


def test_a_clip_takes_all_parameters_of_an_optimizer() -> None:
    model = network()
    conversions = set_up(model)
    optimizer = conversions.convert(adamw(model))
    assert conversions.of(model.parameters()) is optimizer
    with pytest.raises(ValueError, match="X clips all parameters of an optimizer"):
        conversions.of(model[0].parameters())


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


# -- Lightning's Trainer -----------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("named", [False, True])
def test_a_checkpoint_of_lightning_names_parameters_if_the_module_did(named: bool) -> None:
    """A plain optimizer that loads names takes no param group without names, as callbacks add them."""
    pytest.importorskip("pytorch_lightning")

    def configure(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(list(module.named_parameters()) if named else list(module.parameters()))

    strategy = fit_with(unfreezing(1), configure=configure)  # a callback that has added no group
    (group,) = strategy.optimizer_state(strategy.optimizers[0])["param_groups"]
    assert ("param_names" in group) is named


def another_precision() -> dict[str, Any]:
    from pytorch_lightning.plugins import Precision

    return {"plugins": [type("Other", (Precision,), {"precision": "transformer-engine"})()]}


def unfreezing(groups: int) -> dict[str, Any]:
    """Return a callback that has added param groups to the first two."""
    from pytorch_lightning import callbacks

    class Unfreezing(callbacks.BaseFinetuning):  # type: ignore[misc, name-defined]
        def freeze_before_training(self, pl_module: Any) -> None: ...

    found = Unfreezing()
    found.load_state_dict({"internal_optimizer_metadata": {0: [{}] * groups}})
    return {"callbacks": [found]}


def callback(name: str) -> dict[str, Any]:
    """Return a callback of Lightning as a user would build it, or skip where the release has none."""
    from pytorch_lightning import callbacks

    if not hasattr(callbacks, name):
        pytest.skip(f"this release has no {name}")
    needed = {"StochasticWeightAveraging": {"swa_lrs": 0.1}, "ModelPruning": {"pruning_fn": "l1_unstructured"}}
    return {"callbacks": [getattr(callbacks, name)(**needed.get(name, {}))]}


CALLBACKS = {
    "WeightAveraging": "keep a zero.ShardedAverage",
    "EMAWeightAveraging": "keep a zero.ShardedAverage",
    "StochasticWeightAveraging": "keep a zero.ShardedAverage",
    "ModelPruning": "prune the module before fit",
    "BatchSizeFinder": "find the size with one process",
    "LearningRateFinder": "find the rate with one process",
}


@pytest.mark.parametrize(
    ("arguments", "optimizers", "words"),
    [
        (lambda: {"sync_batchnorm": True}, 1, "ZeroStrategy does not take sync_batchnorm"),
        (lambda: {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, 1, "clips by norm, not by value"),
        (another_precision, 1, "does not take the precision 'transformer-engine'"),
        (dict, 2, "ZeroStrategy takes one optimizer, not 2"),
        (lambda: unfreezing(3), 1, "has param groups that Unfreezing has added: resume from one"),
        *(
            (lambda name=name: callback(name), 1, f"ZeroStrategy does not take the callback {name}: .*{remedy}")
            for name, remedy in CALLBACKS.items()
        ),
    ],
)
def test_arguments_and_callbacks_of_a_trainer_that_cannot_be_obeyed_are_errors(
    arguments: Callable[[], dict[str, Any]], optimizers: int, words: str
) -> None:
    pytest.importorskip("pytorch_lightning")
    with pytest.raises(ValueError, match=words):
        fit_with(arguments(), optimizers)


def test_a_strategy_takes_no_argument_of_distributed_data_parallel() -> None:
    pytest.importorskip("pytorch_lightning")
    from zero.integrations import fabric, lightning

    strategies: list[Any] = [lightning.ZeroStrategy, fabric.ZeroFabricStrategy]
    for strategy in strategies:
        with pytest.raises(TypeError, match=f"{strategy.__name__} has no argument find_unused_parameters"):
            strategy(stage=3, find_unused_parameters=True)
    with pytest.raises(ValueError, match="clips by norm, not by value"):
        fabric.ZeroFabricStrategy().clip_gradients_value(network(), adamw(network()), 1.0)


# -- accelerate --------------------------------------------------------------------------------------------------------


PLUGINS = ("fsdp_plugin", "deepspeed_plugin", "megatron_lm_plugin", "parallelism_config")


@pytest.mark.parametrize("name", [*PLUGINS, "DistributedDataParallelKwargs", "dynamo_backend", "mixed_precision"])
def test_arguments_of_an_accelerator_that_cannot_be_obeyed_are_errors(accelerator_class: Any, name: str) -> None:
    import accelerate

    others = {"dynamo_backend": {"dynamo_backend": "eager"}, "mixed_precision": {"mixed_precision": "fp16"}}
    others["DistributedDataParallelKwargs"] = {"kwargs_handlers": [accelerate.DistributedDataParallelKwargs()]}
    with pytest.raises(ValueError, match=f"ZeroAccelerator does not take {name}"):
        accelerator_class(cpu=True, stage=3, **others.get(name, {name: object()}))


def test_calls_of_an_accelerator_that_cannot_be_obeyed_are_errors(accelerator_class: Any) -> None:
    accelerator = accelerator_class(cpu=True, gradient_accumulation_steps=2)
    model = network()
    with pytest.raises(ValueError, match="set up each model before its optimizer"):
        accelerator.prepare(adamw(model), model)
    optimizer = accelerator.prepare(model, adamw(model))[1]
    with pytest.raises(NotImplementedError, match="clips by norm, not by value"):
        accelerator.clip_grad_value_(model.parameters(), 1.0)
    with pytest.raises(NotImplementedError, match=r"optimizer\.optimizer\.join"):
        accelerator.join_uneven_inputs([model])
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(2, 3)).sum())
        with pytest.raises(RuntimeError, match="while gradients are accumulated"):
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
    with accelerator.accumulate(model), pytest.raises(ValueError, match="give all of them"):
        accelerator.clip_grad_norm_(model[0].parameters(), 1.0)
    optimizer.optimizer.close()


def test_an_accelerator_that_finds_fewer_processes_than_were_started_is_an_error(
    accelerator_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a tracker that asked which process it is, before accelerate was told that there is no GPU."""
    from accelerate import PartialState

    PartialState()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"2 processes were started, but accelerate has found 1: .*PartialState\(cpu="):
        accelerator_class(stage=1)


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


def test_a_model_that_torch_compile_returned_is_refused_before_it_is_prepared(accelerator_class: Any) -> None:
    with pytest.raises(ValueError, match=r"does not take a model that torch\.compile returned: prepare the model"):
        accelerator_class(cpu=True).prepare(torch.compile(network(), backend="eager"))


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


# -- arguments of transformers' Trainer --------------------------------------------------------------------------------


@pytest.mark.parametrize("row", REFUSED, ids=str)
def test_an_argument_that_cannot_be_obeyed_is_an_error_and_other_values_of_it_are_taken(row: Any) -> None:
    said = error_of(check_arguments, SimpleNamespace(**{row.argument: row.value}))
    assert said.startswith(f"ValueError: ZeroTrainer does not take TrainingArguments({row.argument}={row.value!r}): ")
    assert row.words in said
    for value in (None, row.taken):
        check_arguments(SimpleNamespace(**{row.argument: value}))


def test_every_refusal_is_one_of_these() -> None:
    for refusal in REFUSALS:
        values = [row.value for row in REFUSED if row.argument == refusal.argument]
        assert any(refusal.refuses(value) for value in values), refusal


def test_a_process_that_is_not_one_rank_and_what_the_environment_chooses_are_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_process(SimpleNamespace(n_gpu=1, world_size=2))
    said = error_of(check_process, SimpleNamespace(n_gpu=4, world_size=1))
    assert_in_order("4 GPUs in one process … torchrun --nproc-per-node 4 SCRIPT", said)
    said = error_of(check_process, SimpleNamespace(n_gpu=0, world_size=1))
    alone = "2 processes were started, but TrainingArguments has found 1: each would train alone"
    assert_in_order(f"{alone} … TrainingArguments(use_cpu=True)", said)
    check_accelerator(SimpleNamespace(state=SimpleNamespace(fsdp_plugin=None), mixed_precision="bf16"))
    for plugin in ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin"):
        chosen = SimpleNamespace(state=SimpleNamespace(**{plugin: object()}), mixed_precision="no")
        assert f"ZeroTrainer does not take Accelerator's {plugin}" in error_of(check_accelerator, chosen)
    said = error_of(check_accelerator, SimpleNamespace(state=SimpleNamespace(), mixed_precision="fp8"))
    assert "ZeroTrainer does not take ACCELERATE_MIXED_PRECISION=fp8" in said


def test_ranks_with_other_arguments_or_datasets_of_other_lengths_are_an_error() -> None:
    def choices(length: int = 7, dispatch: bool | None = None, **changes: Any) -> Any:
        config = SimpleNamespace(dispatch_batches=dispatch)
        args = SimpleNamespace(**{"seed": 1, "data_seed": None, "accelerator_config": config, **changes})
        return choices_of(args, range(length), "train_dataset")

    check_choices([choices(), choices()])
    check_choices([choices(), choices(seed=2, data_seed=1)])  # other draws of dropout, the same samples
    check_choices([choices(7, dispatch=True), choices(8, dispatch=True)])  # rank 0 alone reads
    assert error_of(check_choices, [choices(), choices(), choices(seed=2)]) == (
        "ValueError: ZeroTrainer: TrainingArguments(data_seed=...), by default its seed, is 1 on rank 0 and 2 on rank "
        "2: give all ranks the same arguments and the same whole dataset, of which Trainer deals each rank its part"
    )
    said = error_of(check_choices, [choices(), choices(max_steps=5)])
    assert "TrainingArguments(max_steps=...) is None on rank 0 and 5 on rank 1" in said
    assert "the length of the train_dataset is 7 on rank 0 and 8 on rank 1" in error_of(
        check_choices, [choices(), choices(8)]
    )
    check_ranks(SimpleNamespace(world_size=1), None, "train_dataset")


# -- models that were set up -------------------------------------------------------------------------------------------


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


# -- loaders of accelerate ---------------------------------------------------------------------------------------------


def test_a_prepared_model_needs_a_prepared_optimizer_unless_it_is_for_evaluation(
    accelerator_class: Any,
) -> None:
    accelerator = accelerator_class(cpu=True)
    backward(accelerator.prepare_model(network(), evaluation_mode=True))
    model = accelerator.prepare(network())
    for call in (accelerator.backward, torch.Tensor.backward):
        with pytest.raises(
            RuntimeError, match=r"'2.bias' of the Sequential.*: prepare the optimizer that has it, as in"
        ):
            call(model(torch.ones(2, 3)).sum())


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


def by_rank(data: Any) -> Any:
    return DistributedSampler(data, num_replicas=1, rank=0)


@pytest.mark.parametrize(
    ("words", "loader"),
    [
        ("DistributedSampler has dealt", lambda data: DataLoader(data, 2, sampler=by_rank(data))),
        (
            "DistributedSampler has dealt",
            lambda data: DataLoader(data, batch_sampler=BatchSampler(by_rank(data), 2, False)),
        ),
        ("MicroBatchSampler has dealt", lambda data: DataLoader(data, None, sampler=MicroBatchSampler(data, 2, 0, 1))),
        ("is expected", lambda data: DataLoader(data, batch_sampler=MicroBatchSampler(data, 2, 1, 2))),
    ],
)
def test_a_loader_that_would_be_dealt_out_twice_is_refused(
    accelerator_class: Any, words: str, loader: Callable[[Any], Any]
) -> None:
    with pytest.raises(ValueError, match=f"ZeroAccelerator.* {words}"):
        accelerator_class(cpu=True).prepare(loader(TensorDataset(torch.arange(8))))
