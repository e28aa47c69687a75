"""Counts what a module computes, moves and keeps, by running it once on meta tensors, which have no memory.

Knows: operations as torch dispatches them, and the tensors that autograd saves. Does not know: hardware, ranks.

    matmul_flops, attention_flops    formulas of torch.utils.flop_counter, and 4 * pairs * features for attention
    moved_bytes                      what every other operation reads and writes, views left out
    saved_bytes                      distinct storages that autograd saved and that are alive after the forward
    peak_bytes                       the most that is alive at one moment of forward and backward

Attention (`scaled_dot_product_attention`) and `rms_norm` are counted as the fused kernels of a GPU, which keep their
inputs, outputs and one or two float32 for each row, and never a matrix of scores. Everything else is counted as torch
runs it without a compiler.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from collectives.torch_internals import TorchDispatchMode, missing

from ..model import UnitWork

ATTENTION: Final = {torch.nn.functional.scaled_dot_product_attention}
RMS_NORM: Final = {torch.nn.functional.rms_norm, torch.rms_norm}
ALLOCATIONS: Final = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
GATHERS: Final = {"embedding", "index_select", "gather", "index"}  # they read as much as they write, not their source
BATCHED: Final = {"bmm", "baddbmm"}  # products of two activations: scores, and their product with the values


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors in arguments or results: in lists, tuples, dicts, and by themselves."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes that an operation reads of a tensor: of an expanded one, no more than its storage."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


@dataclass
class OperationCounter:
    """Counts operations while `counting` is on: all of a forward, and of a backward the memory alone.

    Attributes:
        matmul_flops, fp32_flops, attention_flops, moved_bytes, kernels: sums over the forward, as in `UnitWork`.
        backward: whether a backward runs.
        paused: whether nothing is counted.
        live, peak: bytes of the storages that counted operations made, now and at most.
        made: these storages, as long as they are alive, by id.
        saved: those that autograd saved.
        given: storages of parameters and inputs, which are held here.
        reused: ids of those that autograd saved, too.
    """

    matmul_flops: float = 0.0
    fp32_flops: float = 0.0
    attention_flops: float = 0.0
    moved_bytes: float = 0.0
    kernels: int = 0
    backward: bool = False
    paused: bool = False
    live: int = 0
    peak: int = 0
    made: dict[int, weakref.ref[Any]] = field(default_factory=dict)
    saved: dict[int, weakref.ref[Any]] = field(default_factory=dict)
    given: dict[int, Any] = field(default_factory=dict)
    reused: set[int] = field(default_factory=set)

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Leave the storages of parameters and inputs out of what is saved."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self.given[id(storage)] = storage  # held, so that its id stays its own

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count what runs inside."""
        with saved_tensors_hooks(self._save, lambda tensor: tensor), _fused(self), _dispatched(self):
            yield

    def saved_bytes(self) -> int:
        """Return the bytes of distinct storages that autograd saved and that are still alive."""
        return sum(storage.nbytes() for ref in self.saved.values() if (storage := ref()) is not None)

    def work(self, inputs: Iterable[Any]) -> UnitWork:
        """Return what was counted. ``inputs``: the storages of the unit's inputs."""
        distinct = {id(storage): storage.nbytes() for storage in inputs}
        return UnitWork(
            self.matmul_flops,
            self.attention_flops,
            self.moved_bytes,
            self.saved_bytes(),
            sum(distinct.values()),
            self.kernels,
            self.peak,
            self.fp32_flops,
        )

    def fused(self, read: Iterable[Tensor], written: Iterable[Tensor], flops: float) -> None:
        """Count one kernel: attention with its ``flops``, or one that only moves bytes if they are 0."""
        if self.paused or self.backward:
            return
        self.kernels += 1
        self.attention_flops += flops
        if not flops:
            self.moved_bytes += sum(map(bytes_of, (*read, *written)))

    def _save(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if not self.paused and id(storage) in self.given:
            self.reused.add(id(storage))
        elif not self.paused:
            self.saved[id(storage)] = weakref.ref(storage)
        return tensor

    def operation(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation, and count it."""
        result = function(*args, **kwargs)
        if self.paused:
            return result
        inputs, outputs = list(tensors_in((args, kwargs))), list(tensors_in(result))
        before = {id(tensor.untyped_storage()) for tensor in inputs}
        new = [tensor for tensor in outputs if id(tensor.untyped_storage()) not in before]
        for tensor in new:
            self._make(tensor)
        packet = function.overloadpacket
        name = packet.__name__
        is_view = bool(outputs) and not new and not name.endswith("_")
        if self.backward or is_view or name in ALLOCATIONS:
            return result
        self.kernels += 1
        if packet not in flop_registry:
            read = [*inputs[1:], *outputs] if name in GATHERS else inputs
            self.moved_bytes += sum(map(bytes_of, (*read, *outputs)))
        elif "attention" in name or (name in BATCHED and before.isdisjoint(self.given)):
            self.attention_flops += flop_registry[packet](*args, **kwargs, out_val=result)
        else:
            flops = flop_registry[packet](*args, **kwargs, out_val=result)
            self.matmul_flops += flops
            self.fp32_flops += flops * (outputs[0].dtype is torch.float32)
        return result

    def _make(self, tensor: Tensor) -> None:
        """Add a storage to what is alive, until it is freed."""
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self.made or key in self.given:
            return

        def freed(_: object) -> None:
            self.live -= size
            self.made.pop(key, None)
            self.saved.pop(key, None)

        self.made[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)


class _FusedAttention(torch.autograd.Function):
    """Stands for a flash kernel: it keeps queries, keys, values, output and one float32 a row, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        batch, heads, sequence, _ = query.shape
        out = query.new_empty(batch, sequence, heads, value.shape[-1]).transpose(1, 2)  # as flash kernels lay it out
        rows = query.new_empty(batch, heads, sequence, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, rows, *([] if mask is None else [mask]))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, *_ = ctx.saved_tensors
        return *(torch.empty_like(tensor) for tensor in (query, key, value)), None


class _FusedNorm(torch.autograd.Function):
    """Stands for a fused RMSNorm: it keeps its input and one float32 a row, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


class _WithGradient(torch.autograd.Function):
    """Stands for what follows a unit: in a backward it gives the unit's output a gradient."""

    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = out.shape, out.dtype
        return out.new_empty(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].new_empty(ctx.shape, dtype=ctx.dtype)


def _dispatched(counter: OperationCounter) -> Any:
    """Return a mode in which the counter runs every operation that torch dispatches."""
    if (gone := missing(TorchDispatchMode)) is not None:
        gone()

    def dispatch(_: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return counter.operation(function, args, kwargs or {})

    return type("CountedOperations", (TorchDispatchMode,), {"__torch_dispatch__": dispatch})()


def _fused(counter: OperationCounter) -> TorchFunctionMode:
    """Return a mode that puts the fused functions in place of torch's, which have other forms on the meta device."""

    class FusedFunctions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func in ATTENTION:
                return _attention(counter, *args, **kwargs)
            if func in RMS_NORM:
                return _rms_norm(counter, *args, **kwargs)
            return func(*args, **kwargs)

    return FusedFunctions()


def _attention(
    counter: OperationCounter,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **_: Any,
) -> Tensor:
    """Return the output of a fused attention: two products of (queries, keys) pairs, half of them if it is causal."""
    out: Tensor = _FusedAttention.apply(query, key, value, attn_mask)  # type: ignore[no-untyped-call]
    pairs = math.prod(query.shape[:-1]) * key.shape[-2] * (0.5 if is_causal else 1.0)
    counter.fused((query, key, value), (out,), 2 * pairs * (query.shape[-1] + value.shape[-1]))
    return out


def _rms_norm(counter: OperationCounter, input: Tensor, _: Any, weight: Tensor | None = None, **__: Any) -> Tensor:
    out: Tensor = _FusedNorm.apply(input, weight)  # type: ignore[no-untyped-call]
    counter.fused((input,), (out,), 0.0)
    return out


def count(run: Callable[[], Tensor], inputs: Sequence[Tensor], kept: Iterable[Tensor] = ()) -> UnitWork:
    """Return the work of ``run``, which computes on meta tensors and returns its output.

    Args:
        run: what is counted, forward and backward.
        inputs: the unit's input, which the UnitWork counts apart.
        kept: what exists anyway: parameters, buffers, and inputs that several units share.
    """
    counter = OperationCounter()
    counter.exclude((*inputs, *kept))
    with counter.counting():
        out = run()
        work = counter.work(tensor.untyped_storage() for tensor in inputs)
        counter.backward = True
        ends = [tensor for tensor in inputs if tensor.requires_grad]
        if ends and out.requires_grad:
            torch.autograd.grad(cast(Tensor, _WithGradient.apply(out)), ends)  # type: ignore[no-untyped-call]
    return replace(work, peak_bytes=counter.peak)
