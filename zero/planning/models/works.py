"""The work of each unit of a model for one micro-batch: of a transformer by its plain numbers, of a module as it is.

Counts what a module computes, moves and keeps, by running it once on meta tensors, which have no memory.

    matmul_flops, attention_flops    formulas of torch.utils.flop_counter, and 4 * pairs * features for attention
    moved_bytes                      what every other operation reads and writes, views left out
    saved_bytes                      distinct storages that autograd saved and that are alive after the forward
    peak_bytes                       the most that is alive at one moment of forward and backward

Attention (`scaled_dot_product_attention`) and `rms_norm` are counted as the fused kernels of a GPU, which keep their
inputs, outputs and one or two float32 for each row, and never a matrix of scores. Everything else is counted as torch
runs it without a compiler.

A transformer as an ordinary module, built from its plain numbers, so that its work can be counted on meta tensors.

Knows: units, micro-batches, operations. Does not know: hardware, ranks. Nothing has
memory: modules and inputs are on the meta device, and units that are equal are counted once.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from collectives.torch_internals import TorchDispatchMode, missing

from ...core.layout import Dtypes
from ...core.units import ROOT, Units, find_units
from ..model import Model, Transformer, UnitWork

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
        sums: over the forward, by the names of `UnitWork`.
        backward: whether a backward runs.
        paused: whether nothing is counted.
        live, peak: bytes of the storages that counted operations made, now and at most.
        made: these storages, as long as they are alive, by id.
        saved: those that autograd saved.
        given: storages of parameters and inputs, which are held here.
        reused: ids of those that autograd saved, too.
    """

    sums: dict[str, Any] = field(default_factory=lambda: defaultdict(int))
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

    def work(self, inputs: Iterable[Any]) -> UnitWork:
        """Return what was counted; saved are storages that are still alive. ``inputs``: those of the unit's inputs."""
        distinct = {id(storage): storage.nbytes() for storage in inputs}
        saved = sum(storage.nbytes() for ref in self.saved.values() if (storage := ref()) is not None)
        given = sum(distinct.values())
        return UnitWork(**self.sums, saved_bytes=saved, input_bytes=given, peak_bytes=self.peak)

    def fused(self, read: Iterable[Tensor], written: Iterable[Tensor], flops: float) -> None:
        """Count one kernel: attention with its ``flops``, or one that only moves bytes if they are 0."""
        if self.paused or self.backward:
            return
        self.sums["kernels"] += 1
        self.sums["attention_flops"] += flops
        if not flops:
            self.sums["moved_bytes"] += sum(map(bytes_of, (*read, *written)))

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
        self.sums["kernels"] += 1
        if packet not in flop_registry:
            read = [*inputs[1:], *outputs] if name in GATHERS else inputs
            self.sums["moved_bytes"] += sum(map(bytes_of, (*read, *outputs)))
        elif "attention" in name or (name in BATCHED and before.isdisjoint(self.given)):
            self.sums["attention_flops"] += flop_registry[packet](*args, **kwargs, out_val=result)
        else:
            flops = flop_registry[packet](*args, **kwargs, out_val=result)
            self.sums["matmul_flops"] += flops
            self.sums["fp32_flops"] += flops * (outputs[0].dtype is torch.float32)
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


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "silu": functional.silu,
    "relu": functional.relu,
}


def make_norm(numbers: Transformer, features: int) -> nn.Module:
    """Return the norm that a transformer uses, over so many features."""
    if numbers.norm == "rms":
        return nn.RMSNorm(features)
    return nn.LayerNorm(features, elementwise_affine=numbers.norm == "layer", bias=numbers.norm_bias)


class SelfAttention(nn.Module):
    """Attention of (batch, sequence, hidden) to itself, or to ``memory`` of the same shape.

    Queries have `heads` heads, keys and values `kv_heads`.
    """

    def __init__(self, numbers: Transformer, causal: bool) -> None:
        super().__init__()
        self.numbers, self.causal = numbers, causal
        queries, others = numbers.heads * numbers.head_dim, numbers.kv_heads * numbers.head_dim
        self.query = nn.Linear(numbers.hidden, queries, bias=numbers.qkv_bias)
        self.key = nn.Linear(numbers.hidden, others, bias=numbers.qkv_bias)
        self.value = nn.Linear(numbers.hidden, others, bias=numbers.qkv_bias)
        self.out = nn.Linear(queries, numbers.hidden, bias=numbers.out_bias)
        if numbers.head_norms:
            self.query_norm, self.key_norm = (make_norm(numbers, numbers.head_dim) for _ in range(2))

    def forward(self, x: Tensor, rotary: Tensor | None, memory: Tensor | None = None) -> Tensor:
        other = x if memory is None else memory
        query, key, value = self._heads(self.query(x)), self._heads(self.key(other)), self._heads(self.value(other))
        if self.numbers.head_norms:
            query, key = self.query_norm(query), self.key_norm(key)
        if rotary is not None:
            query, key = rotate(query, rotary), rotate(key, rotary)
        if self.numbers.attention == "eager":
            mixed = attend_eagerly(query, key, value, self.causal)
        else:
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal, enable_gqa=True)
        return cast(Tensor, self.out(mixed.transpose(1, 2).flatten(2)))

    def _heads(self, x: Tensor) -> Tensor:
        """Return (batch, heads, sequence, head_dim)."""
        return x.view(*x.shape[:2], -1, self.numbers.head_dim).transpose(1, 2)


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate feature i and feature i + half of (..., sequence, features) by the angle of their position.

    ``rotary``: (2, sequence, features) of cosines, and of sines with their signs (Su et al. 2021, section 3.4).
    """
    half = x.shape[-1] // 2
    return x * rotary[0] + torch.cat([x[..., half:], x[..., :half]], -1) * rotary[1]


def attend_eagerly(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """Return softmax(q k^T) v with all scores in memory and the softmax in float32, as T5 of transformers does."""
    scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[-1])
    if causal:
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill(ones.triu(1), -math.inf)
    return scores.float().softmax(-1).to(value.dtype) @ value


class FeedForward(nn.Module):
    """The feed-forward network of a block, gated or not."""

    def __init__(self, numbers: Transformer) -> None:
        super().__init__()
        if numbers.activation not in ACTIVATIONS:
            raise ValueError(f"activation {numbers.activation!r} is unknown: it is one of {', '.join(ACTIVATIONS)}")
        self.gated, self.activation = numbers.gated, ACTIVATIONS[numbers.activation]
        if numbers.gated:
            self.gate = nn.Linear(numbers.hidden, numbers.ffn, bias=numbers.mlp_bias)
        self.up = nn.Linear(numbers.hidden, numbers.ffn, bias=numbers.mlp_bias)
        self.down = nn.Linear(numbers.ffn, numbers.hidden, bias=numbers.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        inside = self.activation(self.gate(x)) * self.up(x) if self.gated else self.activation(self.up(x))
        return cast(Tensor, self.down(inside))


class TransformerBlock(nn.Module):
    """A block with norms before its attention and its feed-forward network.

    ``crossed``: it attends to an encoder, too.
    """

    def __init__(self, numbers: Transformer, causal: bool = True, crossed: bool = False) -> None:
        super().__init__()
        self.shared = numbers.norms == 1
        self.attention_norm = make_norm(numbers, numbers.hidden)
        self.attention = SelfAttention(numbers, causal)
        self.crossed = crossed
        if crossed:
            self.cross_norm = make_norm(numbers, numbers.hidden)
            self.cross_attention = SelfAttention(numbers, causal=False)
        if not self.shared:
            self.mlp_norm = make_norm(numbers, numbers.hidden)
        self.mlp = FeedForward(numbers)

    def forward(self, x: Tensor, rotary: Tensor | None = None, memory: Tensor | None = None) -> Tensor:
        normed = self.attention_norm(x)
        if self.shared:
            return cast(Tensor, x + self.attention(normed, rotary) + self.mlp(normed))
        x = x + self.attention(normed, rotary)
        if self.crossed:
            x = x + self.cross_attention(self.cross_norm(x), None, memory)
        return cast(Tensor, x + self.mlp(self.mlp_norm(x)))


class ReferenceModel(nn.Module):
    """Embedding, blocks, last norm and head. An encoder has blocks and a last norm of its own."""

    def __init__(self, numbers: Transformer) -> None:
        super().__init__()
        self.numbers = numbers
        self.embedding = nn.Embedding(numbers.vocabulary, numbers.hidden)
        if numbers.positions:
            self.positions = nn.Embedding(numbers.positions, numbers.hidden)
        layers = numbers.layers
        if numbers.decoder_layers:
            self.encoder = nn.ModuleList(TransformerBlock(numbers, causal=False) for _ in range(layers))
            self.encoder_norm = make_norm(numbers, numbers.hidden)
            layers = numbers.decoder_layers
        crossed = bool(numbers.decoder_layers)
        self.blocks = nn.ModuleList(TransformerBlock(numbers, crossed=crossed) for _ in range(layers))
        self.norm = make_norm(numbers, numbers.hidden)
        self.head = nn.Linear(numbers.hidden, numbers.vocabulary, bias=False)
        if numbers.tied:
            self.head.weight = self.embedding.weight

    def embed(self, tokens: Tensor) -> Tensor:
        """Return (batch, sequence, hidden) of int64 (batch, sequence)."""
        x = self.embedding(tokens)
        if self.numbers.positions:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return cast(Tensor, x)


def count_transformer(
    model: Model, micro: int, sequence: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[UnitWork, ...]:
    """Return the work of each unit for a micro-batch.

    Equal blocks are counted once. The root's rest is embedding, last norm, head and loss; of a rotary model it keeps
    the table of angles.

    Args:
        model: a model with the numbers of its transformer.
        micro: sequences of a micro-batch.
        sequence: tokens of a sequence, of an encoder and of its decoder.
        dtype: of parameters and activations.
    """
    numbers = model.transformer
    assert numbers is not None
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
        logits = network.head(network.norm(x))
        held.append(logits)  # a training loop holds them until its backward is over
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())

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
                # its inputs are the units' outputs that it saved, and that are no unit's input
                kept = counter.reused - watch.inputs.keys()
                root = counter.work(storage for key, storage in watch.outputs.items() if key in kept)
                counter.backward = True
                ends = watch.last or [p for p in module.parameters() if p.requires_grad]
                torch.autograd.grad(loss, ends, allow_unused=True)
        except (NotImplementedError, RuntimeError) as error:
            raise ValueError(f"{type(module).__name__} cannot run on the meta device: {error}") from error
    known = {signature: count_call() for signature, count_call in watch.distinct.items()}
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


def _count_call(unit: nn.Module, args: Any, kwargs: dict[str, Any], inputs: Sequence[Tensor]) -> UnitWork:
    """Return the work of a call of a unit, with new tensors in the place of its own."""
    kept = (*unit.parameters(), *unit.buffers(), *tensors_in((args, kwargs)))
    return count(lambda: next(tensors_in(unit(*args, **kwargs))), inputs, kept)


class _UnitWatch:
    """Records how units are called while a module runs, and pauses the counter of the root's rest in them."""

    def __init__(self, counter: OperationCounter, units: Units, hooks: contextlib.ExitStack) -> None:
        self.counter = counter
        self.calls: list[list[object]] = [[] for _ in units.names[1:]]
        self.distinct: dict[object, Callable[[], UnitWork]] = {}
        self.last: list[Tensor] = []
        self.inputs: dict[int, Any] = {}
        self.outputs: dict[int, Any] = {}
        names = {entry.name: entry.module for entry in units.entries}
        for number, name in enumerate(units.names[1:]):
            enter, leave = functools.partial(self._enter, number), self._leave
            hooks.callback(names[name].register_forward_pre_hook(enter, with_kwargs=True).remove)
            hooks.callback(names[name].register_forward_hook(leave, always_call=True).remove)

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
            self.distinct[signature] = functools.partial(
                _count_call, unit, _replaced(args, new), _replaced(kwargs, new), inputs
            )

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
