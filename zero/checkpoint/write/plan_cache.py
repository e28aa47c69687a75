"""The plan of the last save, which serves the next one unless something that it was made from has changed.

Knows: what a plan is made from. Does not know: how one is made, values.

A plan holds while all of these are as they were:

    modules     which tensors and modules each has, under which names; what is not persistent
    tensors     whether parameters are trainable; shape and dtype of those that every rank has whole
    optimizer   its buckets, replicated parameters, and list of param groups; names of its averages
    ranks       what each has described of its states (`Contents.describe`)
    the call    the largest size of a file, and the size of blocks

Values, addresses of memory, and options of param groups are no part of a plan. The comparison makes no call for each
parameter, of which there may be many thousands.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from ...core.parameter_specs import as_plain
from ..contents import Contents, StateFacts
from ..sharded_optimizer import ShardedOptimizer
from .plan import BucketTensor, WritePlan, permuted_tensors


class PlanCache:
    """The last plan of one optimizer on one rank."""

    def __init__(self) -> None:
        self._contents: Contents | None = None
        self._found: list[Any] = []  # what the contents were made from
        self._held: list[Any] = []  # the objects whose ids are noted, so that no other object gets one
        self._modules: list[Any] = []
        self._told: list[bytes] = []
        self._described: tuple[StateFacts, list[BucketTensor]] | None = None
        self._plan: WritePlan | None = None
        self._sizes = (0, 0)

    def contents(self, parts: ShardedOptimizer) -> Contents:
        """Return what the optimizer holds now."""
        if self._contents is None or self._contents.groups is not parts.groups or self._facts() != self._found:
            self._contents, self._described, self._plan = Contents(parts), None, None
            self._modules = [] if parts.module is None else list(parts.module.modules())
            self._found = self._facts()
            self._held = self._objects()
        return self._contents

    def permuted(self, told: Sequence[bytes]) -> list[BucketTensor]:
        """Return the tensors of the last `contents` that ranks gather. Equal on all ranks.

        ``told``: what every rank has described of its states.
        """
        assert self._contents is not None
        if self._described is None or self._told != list(told):
            facts = self._contents.merge(told)
            self._described, self._plan = (facts, permuted_tensors(self._contents, facts)), None
            self._told = list(told)
        return self._described[1]

    def plan(self, max_shard_bytes: int, block_bytes: int) -> WritePlan:
        """Return the plan of the last `contents`, with what ranks have described for `permuted`."""
        assert self._contents is not None
        assert self._described is not None
        sizes = (max_shard_bytes, block_bytes)
        if self._plan is None or sizes != self._sizes:
            self._plan = WritePlan(self._contents, self._described[0], *sizes)
            self._sizes = sizes
        return self._plan

    def _facts(self) -> list[Any]:
        """Return what is compared; equal lists stand for equal contents."""
        assert self._contents is not None
        contents, modules = self._contents, self._modules
        holders = [holder for m in modules for holder in (m._parameters, m._buffers, m._modules)]
        parameters = [p for bucket in contents.buckets for p in bucket.parameters]
        whole = [stored.tensor for stored in contents.model if stored.tensor is not None]
        with as_plain():
            return [
                list(map(id, self._objects())),
                list(map(len, holders)),
                list(chain.from_iterable(holders)),
                [set(m._non_persistent_buffers_set) for m in modules],
                [p.requires_grad for p in parameters],
                [(tensor.shape, tensor.dtype, tensor.layout, type(tensor)) for tensor in whole],
                [name for name, _ in contents.averages.with_values()],
            ]

    def _objects(self) -> list[Any]:
        """Return the objects that are compared by identity."""
        assert self._contents is not None
        storage = self._contents.storage
        holders = [holder for m in self._modules for holder in (m._parameters, m._buffers, m._modules)]
        return [
            storage.layout,
            *storage.buckets,
            *storage.unlisted_buckets(),
            *storage.replicated,
            *chain.from_iterable([holder.values() for holder in holders]),
            *[getattr(tensor, name) for tensor, name in self._contents.wrapped],
        ]
