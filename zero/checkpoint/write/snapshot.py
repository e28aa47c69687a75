"""The values of one moment, while the memory that holds them goes on to change: what a save writes from.

Knows: flat memory by source, which bucket's update will change it, chunks. Does not know: files, ranks, optimizers.

    source      staged at `save`      a copy: parameters (a user may edit them at any time), scalars, the caller's state
                live                  the memory itself: optimizer states and master weights, which only a step changes

    the writer's thread    take(chunk): copies the chunk's bytes out of the sources, live or staged
    the step               before_update(bucket): if a live source of the bucket has bytes that were not taken yet, it
                           is copied now; if a chunk of it is being taken, this waits for that copy alone

So a step never waits for the disk.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from ..format.extents import Chunk

Source = tuple[str, int]


class Snapshot:
    """The sources of one save on one rank. Two threads use it: the one that steps, and the one that writes."""

    def __init__(
        self,
        staged: Mapping[Source, Tensor],
        live: Mapping[Source, tuple[int, Callable[[], Tensor]]],
        chunks: Sequence[Chunk],
    ) -> None:
        """Begin a snapshot.

        Args:
            staged: by source, copies that nobody else changes, 1-D, uint8.
            live: by source, the number of the bucket whose update changes it, and a function that returns its bytes,
                1-D, uint8: a view, or a copy of its own.
            chunks: all that will be taken.
        """
        self._staged = dict(staged)
        self._live = dict(live)
        self._of_bucket: dict[int, list[Source]] = {}
        for source, (bucket, _) in live.items():
            self._of_bucket.setdefault(bucket, []).append(source)
        self._left: Counter[Source] = Counter()
        for chunk in chunks:
            self._left.update(chunk.sources)
        self._open: dict[Source, Tensor] = {}  # bytes of live sources that the thread uses
        self._taking: frozenset[int] = frozenset()  # buckets of the chunk that is being copied
        self._changed = threading.Condition()
        self._over = False

    def take(self, chunk: Chunk, out: Tensor) -> None:
        """Copy the bytes of a chunk to ``out``, 1-D, uint8. Called by the thread that writes, once for each chunk."""
        import numpy as np  # here, because an import of the library needs torch alone

        sources = chunk.sources
        with self._changed:
            for source in sources:
                if source not in self._staged and source not in self._open:
                    self._open[source] = self._live[source][1]()
            found = {source: self._staged.get(source, self._open.get(source)) for source in sources}
            self._taking = frozenset(self._live[source][0] for source in sources if source not in self._staged)
        try:
            # NumPy, because a view of a tensor takes five times as long: many parts have a few hundred bytes
            memory = {source: tensor.numpy() for source, tensor in found.items() if tensor is not None}
            np.concatenate([memory[p.source][p.offset : p.offset + p.nbytes] for p in chunk.parts], out=out.numpy())
        finally:
            with self._changed:
                self._taking = frozenset()
                self._left.subtract(sources)
                for source in sources:
                    if not self._left[source]:
                        self._open.pop(source, None)
                        self._staged.pop(source, None)
                self._changed.notify_all()

    def before_update(self, bucket: int) -> None:
        """Keep the bytes of a bucket's live sources that were not taken yet. Called by the thread that steps."""
        with self._changed:
            for source in self._of_bucket.get(bucket, ()):
                if not self._over and self._left[source] and source not in self._staged:
                    memory = self._open.pop(source, None)
                    self._staged[source] = (self._live[source][1]() if memory is None else memory).clone()
            self._changed.wait_for(lambda: self._over or bucket not in self._taking)

    def end(self) -> None:
        """Drop everything: all was written, or the save has failed. Updates wait for nothing any more."""
        with self._changed:
            self._over = True
            self._staged.clear()
            self._open.clear()
            self._changed.notify_all()
