"""What makes ranks replicas: the same model at construction, rank 0's values, and a way to check later.

Knows: transports, tensors that every rank holds whole, and how one becomes whole. Does not know: gradients, steps.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from collectives import Collective, Kind, Tag, Transport

from .layout import Bucket, Slot


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
        flat = tensor.contiguous().view(-1).view(torch.uint8)
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
    """SHA-256 of a tensor's elements in the order of its dimensions."""
    return hashlib.sha256(tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes()).digest()


def compare(transport: Transport, prints: Sequence[tuple[str, bytes]], purpose: str) -> str:
    """SHA-256 over the fingerprints of named tensors, in their order, after comparing them over the ranks. Collective.

    Raises `RuntimeError` naming the first tensor that differs and the ranks, on every rank.
    """
    told = transport.exchange(b"".join(print_ for _, print_ in prints), Tag(Kind.EXCHANGE, purpose))
    for rank, theirs in enumerate(told):
        for index, (name, _) in enumerate(prints):
            if theirs[32 * index : 32 * index + 32] != told[0][32 * index : 32 * index + 32]:
                raise RuntimeError(
                    f"{name!r} differs between rank 0 and rank {rank}: edit parameters on every rank alike, or inside "
                    "gathered(write=True)"
                )
    return hashlib.sha256(told[0]).hexdigest()
