"""What makes ranks replicas: the same model at construction, rank 0's values, and a way to check later.

Knows: transports, tensors that every rank holds whole, and how one becomes whole. Does not know: gradients, steps.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from collectives import Collective, Kind, Tag, Transport

from .core.layout import Bucket, Slot
from .core.parameter_specs import flattened, parts_of


def agree_on_construction(transport: Transport, lines: Sequence[str], problem: Exception | None) -> None:
    """Compare what the ranks built, as text. Collective.

    The first line that differs is a `ValueError` on every rank, and so is a ``problem`` that one rank found.
    """
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    mine = json.dumps({"problem": None if problem is None else str(problem), "digest": digest})
    told = [json.loads(d) for d in transport.exchange(mine.encode(), Tag(Kind.EXCHANGE, "construction"))]
    if problem is not None:
        raise problem
    for rank, theirs in enumerate(told):
        if theirs["problem"] is not None:
            raise ValueError(f"rank {rank}: {theirs['problem']}")
    if all(theirs["digest"] == digest for theirs in told):
        return
    all_lines = transport.exchange("\n".join(lines).encode(), Tag(Kind.EXCHANGE, "construction, lines"))
    texts = [text.decode().split("\n") for text in all_lines]
    rank = next(r for r, theirs in enumerate(told) if theirs["digest"] != told[0]["digest"])
    length = max(len(texts[0]), len(texts[rank]))
    first, other = ([*text, *["nothing more"] * (length - len(text))] for text in (texts[0], texts[rank]))
    position = next(i for i in range(length) if first[i] != other[i])
    raise ValueError(
        f"the ranks built different models or optimizers: rank 0 has [{first[position]}] where rank {rank} has "
        f"[{other[position]}]"
    )


def broadcast(collective: Collective, transport: Transport, tensors: Iterable[Tensor]) -> None:
    """Group rank 0's values for all, in place. Collective; any dtype, any strides."""
    if transport.world_size == 1:
        return
    for number, tensor in enumerate(tensors):
        flat = _bytes(tensor)
        tag = Tag(Kind.ALL_GATHER, f"copy {number} of rank 0's values", index=number)
        collective.all_gather(flat, [0] + [flat.numel()] * transport.world_size, tag=tag).wait()
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))


def gather_slot(
    collective: Collective, owner: int, bucket: Bucket, slot: Slot, held: tuple[int, Tensor], tag: Tag
) -> Tensor:
    """A slot's elements of a tensor of which every rank holds at least its own slice of the bucket: 1-D, a copy.
    Collective. ``owner``: whose slice this rank has; ``held``: the first element of the bucket that it holds, and what
    it holds from there on."""
    first, values = held
    whole = torch.empty(slot.numel, dtype=values.dtype, device=values.device)
    cuts = [min(max(bound, slot.offset), slot.end) - slot.offset for bound in bucket.bounds]
    low, high = cuts[owner], cuts[owner + 1]
    begin = slot.offset + low - first
    whole[low:high].copy_(values[begin : begin + high - low])
    collective.all_gather(whole, cuts, tag=tag).wait()
    return whole


def fingerprint(tensor: Tensor) -> bytes:
    """SHA-256 of a tensor's elements in the order of its dimensions; of a wrapper subclass, of all that it wraps."""
    digest = hashlib.sha256()
    for part in parts_of(tensor):
        digest.update(_bytes(part).cpu().numpy().data)
    names, facts = flattened(tensor)
    if names:
        digest.update(_text([names, facts]).encode())
    return digest.digest()


def _bytes(tensor: Tensor) -> Tensor:
    """The elements of an ordinary tensor as bytes, 1-D; a view where memory and order allow it."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _text(value: Any) -> str:
    """What a wrapper subclass says of itself, as far as it means the same on every rank: numbers, text and dtypes."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_text(key)}:{_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_text(item) for item in value) + "]"
    plain = value is None or isinstance(value, (bool, int, float, str, torch.dtype))
    return repr(value) if plain else type(value).__name__


def compare(transport: Transport, prints: Sequence[tuple[str, bytes]], purpose: str) -> str:
    """SHA-256 over the fingerprints of named tensors, in their order, after comparing them over the ranks. Collective.

    Raises `RuntimeError` naming the first tensor that differs and the ranks, on every rank.
    """
    told = transport.exchange(b"".join(print_ for _, print_ in prints), Tag(Kind.EXCHANGE, purpose))
    for name, rank in _different([name for name, _ in prints], told)[:1]:
        raise RuntimeError(
            f"{name!r} differs between rank 0 and rank {rank}: edit parameters on every rank alike, or inside "
            "gathered(write=True)"
        )
    return hashlib.sha256(told[0]).hexdigest()


def compare_subclasses(transport: Transport, tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Compare named tensors that each rank has made itself, because nobody may write them. Collective.

    Raises `ValueError` naming all that differ and a rank, on every rank.
    """
    if transport.world_size == 1 or not tensors:
        return
    mine = b"".join(fingerprint(tensor) for _, tensor in tensors)
    told = transport.exchange(mine, Tag(Kind.EXCHANGE, "replicated parameters"))
    different = _different([name for name, _ in tensors], told)
    if different:
        names = dict.fromkeys(name for name, _ in different)
        classes = sorted({type(tensor).__name__ for name, tensor in tensors if name in names})
        raise ValueError(
            f"not the same on every rank: {', '.join(map(repr, names))} (first between rank 0 and rank "
            f"{different[0][1]}). A frozen {' or '.join(classes)} is not copied from rank 0: load or quantise the same "
            "weights on every rank"
        )


def _different(names: Sequence[str], told: Sequence[bytes]) -> list[tuple[str, int]]:
    """The names whose fingerprints are not rank 0's, each with the rank; ``told``: by rank, the fingerprints of all."""
    return [
        (name, rank)
        for rank, theirs in enumerate(told)
        for index, name in enumerate(names)
        if theirs[32 * index : 32 * index + 32] != told[0][32 * index : 32 * index + 32]
    ]
