"""Makes ranks replicas and checks it: the same model at construction, rank 0's values, fingerprints later.

Knows: transports, and tensors that every rank holds whole. Does not know: gradients, steps.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from collectives import Kind, Tag, Transport, ring_broadcast

from .config import Config
from .core.bits import as_bytes
from .core.parameter_specs import flattened, parts_of


def agree_on_construction(transport: Transport, lines: Sequence[str], problem: Exception | None) -> None:
    """Compare, as text, the models and optimizers that the ranks built. Collective.

    Raises `ValueError` on every rank with the first line that differs, or with the ``problem`` that a rank found.
    """
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    text = None if problem is None else str(problem)
    if problem is not None and not isinstance(problem, ValueError | TypeError | RuntimeError):  # of a user's function
        text = f"{type(problem).__name__}: {problem}"  # a KeyError alone says no more than a key
    mine = json.dumps({"problem": text, "digest": digest})
    replies = [json.loads(d) for d in transport.exchange(mine.encode(), Tag(Kind.EXCHANGE, "construction"))]
    if problem is not None:
        raise problem
    for rank, theirs in enumerate(replies):
        if theirs["problem"] is not None:
            raise ValueError(f"rank {rank}: {theirs['problem']}")
    if all(theirs["digest"] == digest for theirs in replies):
        return
    all_lines = transport.exchange("\n".join(lines).encode(), Tag(Kind.EXCHANGE, "construction, lines"))
    texts = [text.decode().split("\n") for text in all_lines]
    rank = next(r for r, theirs in enumerate(replies) if theirs["digest"] != replies[0]["digest"])
    length = max(len(texts[0]), len(texts[rank]))
    first, other = ([*text, *["nothing more"] * (length - len(text))] for text in (texts[0], texts[rank]))
    position = next(i for i in range(length) if first[i] != other[i])
    raise ValueError(
        f"the ranks built different models or optimizers: rank 0 has [{first[position]}] where rank {rank} has "
        f"[{other[position]}]. Build both alike on every rank"
    )


def agree_on_sharing(group: Transport, config: Config) -> int:
    """Agree on the sharding options, and return `ShardingOptions.reshard_group_size`. Collective.

    Raises `ValueError` on every rank if the options are invalid or differ between ranks.
    """
    elsewhere = "None" if config.offload is None else config.offload.kind
    reshard = "a function" if callable(config.reshard_after_forward) else repr(config.reshard_after_forward)
    mine = (
        f"stage={config.stage}, sharding_factor={config.copy_ranks!r}, "
        f"reshard_after_forward={reshard}, prefetch_depth={config.prefetch_depth}, offload={elsewhere}"
    )
    if config.rounding is not None:
        mine += f", rounding={config.rounding}"
    replies = group.exchange(mine.encode(), Tag(Kind.EXCHANGE, "sharding factor"))
    for rank, theirs in enumerate(replies):
        if theirs != replies[0]:
            raise ValueError(
                f"the ranks built different models or optimizers: rank 0 asked for {replies[0].decode()}, but rank "
                f"{rank} for {theirs.decode()}. Pass the same arguments on every rank"
            )
    return config.reshard_group_size(group.world_size)


def broadcast(transport: Transport, tensors: Sequence[Tensor], source: int = 0) -> None:
    """Copy rank ``source``'s values of ``tensors`` to all ranks, in place. Any dtype, any strides. Collective."""
    if transport.world_size == 1 or not tensors:
        return
    sizes = [tensor.numel() * tensor.itemsize for tensor in tensors]
    label = f"the copy of rank {source}'s values (tensors: {len(sizes)}, bytes: {sum(sizes)})"
    ways = [transport.backend.stays_on(tensor.device) for tensor in tensors]
    tag = Tag(Kind.BROADCAST, label, digest=zlib.crc32(repr((sizes, ways)).encode()))
    if source and transport.rank in (0, source):
        to_rank_0 = tag._replace(kind=Kind.GATHER)
        for flat in _flat(tensors):
            if flat.numel() and transport.rank == source:
                transport.isend(flat, 0, to_rank_0, one_way=True).wait()
            elif flat.numel():
                transport.irecv(flat, source, to_rank_0, one_way=True).wait()
    ring_broadcast(transport, _flat(tensors), tag)


def _flat(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the bytes of each tensor, 1-D. What was written into them is in the tensor when the next ones are asked
    for."""
    for tensor in tensors:
        flat = _bytes(tensor)
        yield flat
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))


def fingerprint(tensor: Tensor) -> bytes:
    """Return the SHA-256 of a tensor's elements in the order of its dimensions.

    For a wrapper subclass, it covers all wrapped tensors and the metadata.
    """
    digest = hashlib.sha256()
    for part in parts_of(tensor):
        digest.update(_bytes(part).cpu().numpy().data)
    names, facts = flattened(tensor)
    if names:
        digest.update(_text([names, facts]).encode())
    return digest.digest()


def _bytes(tensor: Tensor) -> Tensor:
    """Return the elements of an ordinary tensor as 1-D bytes; a view if its memory and order allow it."""
    return as_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous())


def _text(value: Any) -> str:
    """Return the metadata of a wrapper subclass as text that can be compared between ranks.

    Numbers, text and dtypes are written with their values; of other objects only the name of the class.
    """
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_text(key)}:{_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_text(item) for item in value) + "]"
    plain = value is None or isinstance(value, (bool, int, float, str, torch.dtype))
    return repr(value) if plain else type(value).__name__


def compare(transport: Transport, prints: Sequence[tuple[str, bytes]], purpose: str) -> str:
    """Compare the fingerprints of named tensors over the ranks, and return the SHA-256 over them, in order. Collective.

    Raises `RuntimeError` on every rank, naming the first tensor that differs and the ranks.
    """
    replies = transport.exchange(b"".join(print_ for _, print_ in prints), Tag(Kind.EXCHANGE, purpose))
    for name, rank in _different([name for name, _ in prints], replies)[:1]:
        raise RuntimeError(
            f"{name!r} differs between rank 0 and rank {rank}: edit parameters on every rank alike, or inside "
            "gathered(write=True)"
        )
    return hashlib.sha256(replies[0]).hexdigest()


def compare_subclasses(transport: Transport, tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Compare named tensors that each rank made itself, because they cannot be overwritten with rank 0's. Collective.

    Raises `ValueError` on every rank, naming all tensors that differ, and a rank.
    """
    if transport.world_size == 1 or not tensors:
        return
    mine = b"".join(fingerprint(tensor) for _, tensor in tensors)
    replies = transport.exchange(mine, Tag(Kind.EXCHANGE, "replicated parameters"))
    different = _different([name for name, _ in tensors], replies)
    if different:
        names = dict.fromkeys(name for name, _ in different)
        classes = sorted({type(tensor).__name__ for name, tensor in tensors if name in names})
        raise ValueError(
            f"not the same on every rank: {', '.join(map(repr, names))} (first between rank 0 and rank "
            f"{different[0][1]}). A frozen {' or '.join(classes)} is not copied from rank 0: load or quantise the same "
            "weights on every rank"
        )


def _different(names: Sequence[str], replies: Sequence[bytes]) -> list[tuple[str, int]]:
    """Return the names whose fingerprints differ from rank 0's, each with the rank.

    ``replies`` has the concatenated fingerprints of each rank.
    """
    return [
        (name, rank)
        for rank, theirs in enumerate(replies)
        for index, name in enumerate(names)
        if theirs[32 * index : 32 * index + 32] != replies[0][32 * index : 32 * index + 32]
    ]
