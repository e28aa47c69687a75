"""The work of each unit of a model for one micro-batch: of a transformer by its plain numbers, of a module as it is.

Knows: units, micro-batches, which blocks are recomputed. Does not know: how operations are counted, hardware, ranks.
Nothing has memory: modules and inputs are on the meta device, and units that are equal are counted once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...core.layout import Dtypes
from ...core.units import ROOT, Units, find_units
from ..model import Model, UnitWork
from .counting import OperationCounter, bytes_of, count, tensors_in
from .reference import ReferenceModel


def count_transformer(
    model: Model, micro: int, sequence: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[UnitWork, ...] | None:
    """Return the work of each unit for a micro-batch; None if the model's source does not say what it computes.

    Equal blocks are counted once. The root's rest is embedding, last norm, head and loss; of a rotary model it keeps
    the table of angles.

    Args:
        model: a model with the numbers of its transformer.
        micro: sequences of a micro-batch.
        sequence: tokens of a sequence, of an encoder and of its decoder.
        dtype: of parameters and activations.
    """
    numbers = model.transformer
    if numbers is None:
        return None
    one = replace(numbers, layers=1, decoder_layers=min(1, numbers.decoder_layers))
    with torch.device("meta"):
        network = ReferenceModel(replace(one, positions=sequence if numbers.positions else 0)).to(dtype)
        tokens = torch.empty(micro, sequence, dtype=torch.int64)
        x, memory = (torch.empty(micro, sequence, numbers.hidden, dtype=dtype, requires_grad=True) for _ in range(2))
        rotary = torch.empty(2, sequence, numbers.head_dim, dtype=dtype) if numbers.rotary else None
    weights, shared = list(network.parameters()), [memory] if rotary is None else [rotary, memory]

    def block_work(block: nn.Module, *more: Tensor) -> UnitWork:
        return count(lambda: cast(Tensor, block(x, rotary, *more)), [x], [*weights, *shared])

    def loss() -> Tensor:
        logits = network.logits(x)
        held.append(logits)  # a training loop holds them until its backward is over
        return network.loss(logits, tokens)

    held: list[Tensor] = []
    root = [
        count(lambda: network.embed(tokens), [tokens], weights),
        count(loss, [x], [*weights, tokens]),
    ]
    if rotary is not None:
        root.append(UnitWork(saved_bytes=bytes_of(rotary)))
    blocks = [block_work(network.blocks[0], *([memory] if numbers.decoder_layers else []))]
    blocks *= numbers.decoder_layers or numbers.layers
    if numbers.decoder_layers:
        root += [count(lambda: network.embed(tokens), [tokens], weights)]
        root += [
            count(lambda: cast(Tensor, network.encoder_norm(x)), [x], weights),
            UnitWork(saved_bytes=bytes_of(memory)),
        ]
        blocks = [block_work(network.encoder[0])] * numbers.layers + blocks
    return (together(root), *blocks)


def count_module(module: nn.Module, run: Callable[[nn.Module], Tensor]) -> tuple[UnitWork, ...]:
    """Return the work of each unit of a module on the meta device, in the dtype in which it computes.

    Units with equal parameters and inputs are counted once. ``run`` calls the module with a micro-batch on the meta
    device, and returns the loss. Raises `ValueError` if it cannot run without values.
    """
    counter = OperationCounter()
    with contextlib.ExitStack() as hooks:
        watch = _UnitWatch(counter, find_units(module, None), hooks)
        counter.exclude((*module.parameters(), *module.buffers()))
        try:
            with counter.counting():
                loss = run(module)
                root = counter.work(watch.saved_outputs())
                counter.backward = True
                ends = watch.last or [p for p in module.parameters() if p.requires_grad]
                torch.autograd.grad(loss, ends, allow_unused=True)
        except (NotImplementedError, RuntimeError) as error:
            raise ValueError(f"{type(module).__name__} cannot run on the meta device: {error}") from error
    known = {signature: call.count() for signature, call in watch.distinct.items()}
    works = [together([known[signature] for signature in calls]) for calls in watch.calls]
    return (replace(root, peak_bytes=counter.peak), *works)


def products_in_fp32(model: Model, works: Sequence[UnitWork], dtypes: Sequence[Dtypes], tokens: int) -> list[UnitWork]:
    """Return the work of units that were counted in one dtype, with the products of the weights that are in fp32.

    A weight's product takes two operations for each of its elements and each token. In the root's rest that is the
    head: the matrix with two names, else the last one; the others are tables. What is saved in fp32 is not counted.

    Args:
        model: what was counted.
        works: of its units.
        dtypes: of its parameters.
        tokens: of a micro-batch.
    """
    matrices = [p for p in model.parameters if p.unit == ROOT and len(p.shape) == 2]
    tied = [p for p in matrices if len(p.names) > 1]
    head = next(iter(tied or matrices[-1:]), None)
    kept = {id(p) for p, each in zip(model.parameters, dtypes, strict=True) if each.param_dtype is torch.float32}
    numels = model.by_unit(lambda p: p.numel if id(p) in kept and len(p.shape) == 2 and (p.unit or p is head) else 0)
    return [
        replace(work, fp32_flops=min(work.matmul_flops, 2.0 * numel * tokens))
        for work, numel in zip(works, numels, strict=True)
    ]


@dataclass(frozen=True)
class _Call:
    """A call of a unit, with new tensors in the place of its own."""

    unit: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[Tensor, ...]

    def count(self) -> UnitWork:
        kept = (*self.unit.parameters(), *self.unit.buffers(), *tensors_in((self.args, self.kwargs)))
        return count(lambda: next(tensors_in(self.unit(*self.args, **self.kwargs))), self.inputs, kept)


class _UnitWatch:
    """Records how units are called while a module runs, and pauses the counter of the root's rest in them."""

    def __init__(self, counter: OperationCounter, units: Units, hooks: contextlib.ExitStack) -> None:
        self.counter = counter
        self.calls: list[list[object]] = [[] for _ in units.names[1:]]
        self.distinct: dict[object, _Call] = {}
        self.last: list[Tensor] = []
        self.inputs: dict[int, Any] = {}
        self.outputs: dict[int, Any] = {}
        names = {entry.name: entry.module for entry in units.entries}
        for number, name in enumerate(units.names[1:]):
            enter, leave = functools.partial(self._enter, number), self._leave
            hooks.callback(names[name].register_forward_pre_hook(enter, with_kwargs=True).remove)
            hooks.callback(names[name].register_forward_hook(leave, always_call=True).remove)

    def saved_outputs(self) -> list[Any]:
        """Return the storages of units' outputs that the root's rest saved, and that are no unit's input."""
        return [kept for key, kept in self.outputs.items() if key in self.counter.reused and key not in self.inputs]

    def _enter(self, number: int, unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.counter.paused = True
        given = list(tensors_in((args, kwargs)))
        fresh = [id(tensor.untyped_storage()) not in self.inputs for tensor in given]
        self.inputs.update({id(tensor.untyped_storage()): tensor.untyped_storage() for tensor in given})
        shapes = [(p.shape, p.dtype, p.requires_grad) for p in (*unit.parameters(), *unit.buffers(), *given)]
        signature = (type(unit), *shapes, *fresh)
        self.calls[number].append(signature)
        if signature not in self.distinct:
            new = {id(tensor): torch.empty_like(tensor).requires_grad_(tensor.requires_grad) for tensor in given}
            inputs = tuple(new[id(tensor)] for tensor, is_fresh in zip(given, fresh, strict=True) if is_fresh)
            self.distinct[signature] = _Call(unit, _replaced(args, new), _replaced(kwargs, new), inputs)

    def _leave(self, unit: nn.Module, args: Any, output: Any) -> None:
        self.counter.paused = False
        self.last = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        self.counter.exclude(tensors_in(output))
        self.outputs.update({id(t.untyped_storage()): t.untyped_storage() for t in tensors_in(output)})


def _replaced(value: Any, new: Mapping[int, Tensor]) -> Any:
    """Return lists, tuples and dicts with new tensors in the place of others."""
    if isinstance(value, Tensor):
        return new[id(value)]
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_replaced(part, new) for part in value)
    if isinstance(value, dict):
        return {key: _replaced(part, new) for key, part in value.items()}
    return value


def together(works: Sequence[UnitWork]) -> UnitWork:
    """Return the work of parts that run one after the other, and keep what they save until all have run."""
    saved = sum(work.saved_bytes for work in works)
    peak = max((work.peak_bytes - work.saved_bytes for work in works), default=0)
    sums = {each.name: sum(getattr(work, each.name) for work in works) for each in fields(UnitWork)}
    return UnitWork(**{**sums, "peak_bytes": saved + max(peak, 0)})


def recomputed(layers: int, recompute: str) -> tuple[bool, ...]:
    """Return which of so many blocks are recomputed in the backward.

    ``recompute``: "none", "selective" (every second block, the first one included), or "full".
    """
    if recompute not in ("none", "selective", "full"):
        raise ValueError(f"recompute {recompute!r} is unknown: it is 'none', 'selective' or 'full'")
    return tuple(recompute == "full" or (recompute == "selective" and not number % 2) for number in range(layers))


def kept_bytes(work: UnitWork, is_recomputed: bool) -> int:
    """Return the bytes that a unit holds from its forward to its backward: its input, and what it saved if kept."""
    return work.input_bytes + (0 if is_recomputed else work.saved_bytes)
