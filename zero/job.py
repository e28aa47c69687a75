"""A training as one record, `Job`: it can be written for other processes, and run by the plain loop or on ranks.

Knows: which arguments are valid, how another process finds a function, the steps of both loops. Does not know: how
processes are started, what is compared. Nothing is unpickled: a file is read with `weights_only=True`, and functions
and classes are imported.

    save(job) -> load -> LoadedJob -> plain_steps      torch's optimizer, without this library, in one process
                                  -> sharded_steps    a `ZeroOptimizer` on each rank
"""

from __future__ import annotations

import importlib
import io
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor, nn

from .config import ShardingOptions
from .core.layout import Dtypes
from .core.parameter_specs import as_groups, is_laid_out
from .core.units import Given, Ignored
from .optimizer import ZeroOptimizer
from .parameters.casting import cast as cast_to
from .parameters.casting import put_casts
from .precision import Precisions, Rule
from .step.arguments import arguments_of, check_class
from .step.clip import check_norm_arguments, clip_grad_norm_


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training, from the construction of its model to its last step. `zero.verify` describes the fields.

    ``options`` are those of the `ZeroOptimizer`; the plain loop has their precision, their rounding and the place of
    their step. ``micro_batches`` is the number per step over all ranks, by which the summed gradient is divided.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
    """

    options: ShardingOptions
    build_model: Callable[[], nn.Module]
    batches: Sequence[Any] | Callable[[], Sequence[Any]]
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW
    optimizer_kwargs: dict[str, Any] = field(default_factory=dict)
    param_groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None
    ignored: Callable[[nn.Module], Given] | None = None
    loss_fn: Callable[[nn.Module, Any], Tensor] | None = None
    micro_batches: int = 1
    max_norm: float | None = None
    threads: int = 1
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_class(self.optimizer_class)
        for name in ("build_model", "param_groups", "ignored", "loss_fn"):
            value = getattr(self, name)
            if not callable(value) and (value is not None or name == "build_model"):
                raise TypeError(f"{name} must be a function or a class, not {value!r}")
        for name in ("micro_batches", "threads"):
            object.__setattr__(self, name, integers([getattr(self, name)], name)[0])
        if self.max_norm is not None:
            check_norm_arguments(self.max_norm, 2.0)
        if not callable(self.batches):
            object.__setattr__(self, "batches", self.as_batches(self.batches))

    def as_batches(self, batches: Any) -> list[Any]:
        """Return micro-batches as a list. Raises TypeError if they are no finite collection, ValueError if they do not
        fill the last step."""
        if not hasattr(batches, "__iter__") or not hasattr(batches, "__len__") or isinstance(batches, (str, Mapping)):
            kind = type(batches).__name__
            raise TypeError(f"batches must be a sequence of micro-batches, or a function that returns one, not {kind}")
        found = list(batches)
        if not found or len(found) % self.micro_batches:
            raise ValueError(
                f"batches has {len(found)} micro-batches, and a step takes {self.micro_batches} of them: give a "
                "multiple of that, or set micro_batches"
            )
        return found


class LoadedJob:
    """A `Job` in this process: its model as built, its micro-batches, the number of steps.

    Torch's random generator is seeded with 0 for the construction, and with ``seed`` for the training. ``at`` is called
    with each place, in words, before its work. ``several_backwards``: `loss_fn` ran a backward itself.
    """

    def __init__(self, job: Job, seed: int = 0, at: Callable[[str], None] = lambda place: None) -> None:
        self.job, self.at, self.several_backwards = job, at, False
        torch.manual_seed(0)
        at("build_model()")
        self.model = job.build_model()
        if not isinstance(self.model, nn.Module):
            raise TypeError(f"build_model() must return an nn.Module, not {type(self.model).__name__}")
        if job.device != "cpu":
            self.model.to(job.device)
        at("batches")
        self._batches = job.as_batches(job.batches() if callable(job.batches) else job.batches)
        self.steps = len(self._batches) // job.micro_batches
        torch.manual_seed(seed)

    def plain_steps(self) -> Iterator[int]:
        """Take the steps of the plain loop, and yield the number of each; 0 is the model as built. Local."""
        self.at("the optimizer class")
        loop = PlainLoop(self.job, self.model)
        yield 0
        for step in range(1, self.steps + 1):
            for number in range(self.job.micro_batches):
                self._backward(step, number)
                loop.end_micro_batch()
            self.at(f"step {step}, the update")
            loop.update()
            yield step

    def sharded_steps(self, **ranks: Any) -> Iterator[tuple[int, ZeroOptimizer]]:
        """Take the steps with a `ZeroOptimizer`, and yield the number of each, with it; 0 is the model as built. All
        ranks must call it, and close the optimizer. ``ranks``: its ``process_group`` or ``mesh``."""
        job = self.job
        self.at("ZeroOptimizer(...)")
        optimizer = ZeroOptimizer(
            self.model if job.param_groups is None else job.param_groups(self.model),
            job.optimizer_class,
            module=self.model,
            ignored=None if job.ignored is None else job.ignored(self.model),
            divisor=job.micro_batches,
            optimizer_kwargs=job.optimizer_kwargs,
            **job.options.arguments(),
            **ranks,
        )
        yield 0, optimizer
        for step in range(1, self.steps + 1):
            with optimizer.join() if job.micro_batches % optimizer.world_size else nullcontext():
                for number in range(optimizer.rank, job.micro_batches, optimizer.world_size):
                    self._backward(step, number)
            self.at(f"step {step}, the update")
            if job.max_norm is not None:
                optimizer.clip_grad_norm_(job.max_norm)
            optimizer.step()
            optimizer.zero_grad()
            yield step, optimizer

    def _backward(self, step: int, number: int) -> None:
        """Run the forward and backward of micro-batch ``number`` (from 0) of step ``step`` (from 1)."""
        index, given = (step - 1) * self.job.micro_batches + number, self.job.loss_fn
        self.at(f"step {step}, batches[{index}]")
        before = [(parameter.grad, getattr(parameter.grad, "_version", 0)) for parameter in self.model.parameters()]
        batch = self._batches[index] if self.job.device == "cpu" else _moved(self._batches[index], self.job.device)
        if given:
            loss: Any = given(self.model, batch)
        elif isinstance(batch, Mapping):
            loss = self.model(**batch)
        else:
            loss = self.model(*batch) if isinstance(batch, (tuple, list)) else self.model(batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            what = "loss_fn(model, batch)" if given else "without loss_fn the model"
            kind = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(f"{what} must return the loss, one element with a graph behind it, not {kind}")
        self.several_backwards |= any(
            parameter.grad is not gradient or getattr(gradient, "_version", 0) != version
            for parameter, (gradient, version) in zip(self.model.parameters(), before, strict=True)
        )
        loss.backward()  # type: ignore[no-untyped-call]


def _moved(value: Any, device: str) -> Any:
    """Return a micro-batch with its tensors on the device."""
    if hasattr(value, "to"):  # also a batch of another library
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_moved(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


class PlainLoop:
    """The update of the plain loop: optimizers of torch for a model, one of each class that param groups name.

    In mixed precision, and where the host steps, they step master weights. Gradients are then added up in a dtype of
    their own, after each micro-batch.
    """

    def __init__(self, job: Job, model: nn.Module) -> None:
        self._job = job
        left = Ignored(None if job.ignored is None else job.ignored(model), model)
        every = [parameter for parameter in model.parameters() if parameter not in left]
        groups = as_groups(every if job.param_groups is None else job.param_groups(model))
        listed = [e[1] if isinstance(e, tuple) else e for group in groups for e in group["params"]]
        self._dtypes = dict[Tensor, Dtypes]()  # by parameter, if there are master weights
        self._sums = dict[Tensor, nn.Parameter]()  # by parameter; each is the ``grad`` of an empty tensor
        self._stepped: dict[Tensor, Tensor] = {parameter: parameter for parameter in listed}
        if job.options.mixed_precision is not None or job.options.steps_on_host:
            self._add_masters(model, every, left)
        self._stacks: list[tuple[Tensor, Any, Sequence[Tensor]]] = []  # a tensor with blocks, and these as parameters
        by_class: dict[Any, list[dict[str, Any]]] = {}
        for group in groups:
            ours = ("optimizer_class", "partition", "blocks")
            options = {name: value for name, value in group.items() if name not in ours}
            options["params"] = self._entries(group["params"], group.get("blocks"))
            by_class.setdefault(group.get("optimizer_class"), []).append(options)
        self._optimizers: list[torch.optim.Optimizer] = []
        for named, own in by_class.items():  # a class that groups name has its arguments from the first of them
            given = {name: value for name, value in own[0].items() if name != "params"}
            arguments = job.optimizer_kwargs if named is None else arguments_of(named, given)
            self._optimizers.append((named or job.optimizer_class)(own, **arguments))

    def _add_masters(self, model: nn.Module, parameters: Sequence[Tensor], left: Ignored) -> None:
        """Cast the model, and give the listed parameters master weights."""
        options = self._job.options
        rule, rounds = cast(Rule, options.mixed_precision), options.rounding is not None
        precisions = Precisions(rule, model, left, rounds=rounds)
        for parameter in dict.fromkeys((*parameters, *self._stepped)):
            dtypes = self._dtypes[parameter] = precisions.of(parameter)
            master = parameter.detach()  # a cast gives the parameter other memory
            cast_to(parameter, dtypes.param_dtype)
            if is_laid_out(parameter):
                known = master if parameter.requires_grad else parameter.detach()  # a frozen one has no wide copy
                place = "cpu" if options.steps_on_host else None
                master = known.to(place, dtypes.master_dtype, copy=True).requires_grad_()
            if parameter in self._stepped:
                self._stepped[parameter] = master
        for buffer, dtype in precisions.buffers():
            cast_to(buffer, dtype)
        for border in precisions.borders:
            put_casts(border, None)

    def _entries(self, entries: list[Any], blocks: Any) -> list[Any]:
        """Return the entries of a param group as its class gets them: master weights, and blocks as parameters."""
        every: list[Any] = []
        for entry in entries:
            name, parameter = entry if isinstance(entry, tuple) else (None, entry)
            tensor = self._stepped[parameter]
            parts: Sequence[Tensor] = [tensor]
            if blocks is not None:
                parts = [view.requires_grad_(parameter.requires_grad) for view in _cut(tensor.detach(), blocks)]
                self._stacks.append((tensor, blocks, parts))
            every += parts if name is None else [(name, part) for part in parts]
        return every

    def end_micro_batch(self) -> None:
        """Finish a micro-batch. Without master weights its backward has added its gradients to the others."""
        for parameter, dtypes in self._dtypes.items():
            if parameter in self._stepped and parameter.grad is not None:
                arrived = parameter.grad.to(dtypes.reduce_dtype).to(dtypes.accumulate_dtype)
                total = self._sums.setdefault(parameter, nn.Parameter(torch.empty_like(arrived)))
                total.grad = arrived if total.grad is None else total.grad.add_(arrived)
                parameter.grad = None

    def update(self) -> None:
        """Divide and clip the gradients, step, and clear them."""
        holders = list(self._sums.values() if self._dtypes else self._stepped)
        for holder in holders:
            if holder.grad is not None:
                holder.grad.div_(self._job.micro_batches)
        if self._job.max_norm is not None:
            clip_grad_norm_(holders, self._job.max_norm)
        means: dict[Tensor, Any] = {self._stepped[parameter]: total.grad for parameter, total in self._sums.items()}
        rounding = self._job.options.rounding
        if rounding is None:
            for tensor, mean in means.items():
                tensor.grad = mean.to(tensor)
            for tensor, blocks, views in self._stacks:
                gradients = [None] * len(views) if tensor.grad is None else _cut(tensor.grad, blocks)
                for view, gradient in zip(views, gradients, strict=True):
                    view.grad = gradient
        for optimizer in self._optimizers:
            if rounding is None:
                optimizer.step()
            else:
                rounding.step(optimizer, means if self._dtypes else None, self._stepped.values())
        with torch.no_grad():
            for parameter in self._sums:
                parameter.copy_(self._stepped[parameter])
        self._sums.clear()
        for tensor in self._stepped.values():
            tensor.grad = None


def _cut(tensor: Tensor, blocks: Any) -> Sequence[Tensor]:
    """Return the blocks of a parameter or of its gradient, as views."""
    if isinstance(blocks, int):
        return tensor.view(tensor.shape[blocks % tensor.dim() :]).unbind()
    views: Sequence[Tensor] = torch.split(tensor, list(blocks))
    return views


# -- written for other processes ---------------------------------------------------------------------------------------


def save(record: Any, file: str | os.PathLike[str] | BinaryIO) -> None:
    """Write a frozen dataclass, with those in its fields, functions and classes, so that `load` reads it elsewhere.

    Raises `TypeError` if another process could not read it; the message names the field.
    """
    torch.save(_written(record, "the record"), file)


def load(file: str | os.PathLike[str] | BinaryIO) -> Any:
    """Return what `save` wrote."""
    return _read(torch.load(file, weights_only=True))


def _written(value: Any, name: str) -> Any:
    """Return a value as data: the name of a function, and a record with the name of its class. ``name``: its field."""
    if is_dataclass(value) and not callable(value):
        values = {item.name: _written(getattr(value, item.name), item.name) for item in fields(value)}
        return {"name": reference(type(value), name), "fields": values}
    if isinstance(value, tuple):
        return tuple(_written(item, name) for item in value)
    if callable(value):
        return {"name": reference(value, name)}
    if isinstance(value, os.PathLike):
        return {"path": os.fspath(value)}
    value = {"data": value} if isinstance(value, dict) else value
    try:
        torch.save(value, buffer := io.BytesIO())
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        reason = str(error).split("\n")[0]
        remedy = "give a function that returns them" if name == "batches" else "leave out what is none of these"
        what = "the optimizer's arguments" if name == "optimizer_kwargs" else name
        raise TypeError(
            f"{what} must hold only tensors, numbers, text, lists, tuples and dicts, since they go to other processes "
            f"({type(error).__name__}: {reason}): {remedy}"
        ) from error
    return value


def _read(written: Any) -> Any:
    """Return the value that `_written` wrote."""
    if isinstance(written, tuple):
        return tuple(map(_read, written))
    if not isinstance(written, dict):
        return written
    if "data" in written:
        return written["data"]
    if "path" in written:
        return Path(written["path"])
    named = resolve(written["name"])
    return named(**{name: _read(value) for name, value in written["fields"].items()}) if "fields" in written else named


def integers(values: Sequence[int], name: str, least: int = 1) -> tuple[int, ...]:
    """Return the distinct whole numbers, in their order. Raises TypeError or ValueError if they are none of these."""
    try:
        numbers = tuple(dict.fromkeys(operator.index(value) for value in values))
    except TypeError:
        raise TypeError(f"{name} must be a sequence of whole numbers, not {values!r}") from None
    if not numbers or min(numbers) < least:
        raise ValueError(f"{name} must hold numbers of at least {least}, not {values!r}")
    return numbers


def reference(function: Any, name: str) -> str:
    """Return the name by which another process finds a function or class: "MODULE:NAME" or "/PATH/SCRIPT.py:NAME".

    Raises:
        TypeError: it cannot be found by name.
    """
    qualified, where = getattr(function, "__qualname__", ""), getattr(function, "__module__", None) or ""
    try:
        found = operator.attrgetter(qualified)(sys.modules[where])
    except (KeyError, AttributeError):
        found = None
    if where == "__main__":
        main = sys.modules[where]
        script = Path(getattr(main, "__file__", None) or "")  # a folder if there is none
        where = main.__spec__.name if main.__spec__ else str(script.resolve()) if script.is_file() else ""
    if not where or found is not function:
        raise TypeError(
            f"{name} is {qualified or repr(function)}, which other processes cannot import by name: define it with def "
            "or class at the top level of a module or a script (a lambda, a function inside a function, a partial or "
            "what was typed into an interactive session has no such name)"
        )
    return f"{where}:{qualified}"


def resolve(text: str) -> Any:
    """Import the function or class that `reference` named. A script is imported once, as a module; the block under
    `if __name__ == "__main__":` does not run."""
    where, _, qualified = text.rpartition(":")
    if os.path.isabs(where):
        path, where = where, "__zero_job_script__"
        if where not in sys.modules:
            module = sys.modules[where] = ModuleType(where)
            module.__file__ = path
            SourceFileLoader(where, path).exec_module(module)
    return operator.attrgetter(qualified)(importlib.import_module(where))
