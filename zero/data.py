"""`MicroBatchSampler`: which samples each rank loads, in whole micro-batches of one order.

Knows: the number of samples, the order of an epoch, the micro-batches of each rank, and how many of them are trained.
Does not know: the samples themselves, process groups, the optimizer.

    order, a function of (seed, epoch)     7 2 | 0 5 | 3 1 | 6 4 | 8
    micro-batch, of two samples             0     1     2     3    4
    step, of three micro-batches            0     0     0     1    1     the last step is incomplete
    rank, of two                            0     1     0     0    1     micro-batch i of a step: i mod 2
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

_OF_THE_ORDER = ("samples", "batch_size", "seed", "shuffle")  # what a position in an epoch depends on


class MicroBatchSampler(Sampler[list[int]]):
    """Deals whole micro-batches to the ranks, as the ``batch_sampler`` of a `torch.utils.data.DataLoader`.

    The micro-batches of an epoch and their order do not depend on the number of ranks. Micro-batch i of a step goes to
    rank i mod ``world``; no other rank loads it. The plain loop with the same bits uses ``rank=0, world=1``, and
    accumulates as many micro-batches per step. Every rank builds its own sampler; all arguments but ``rank`` must be
    equal, which `check_ranks` verifies. All other calls are local.

    A loader's workers fetch indices ahead of training, so the sampler counts trained micro-batches by calls of `step`.
    It counts over all ranks, so training can continue on another number of ranks.

    Attributes:
        epoch: the epoch that an iteration deals.
        trained: the number of trained micro-batches of the epoch, over all ranks. An iteration starts behind them.
        per_step: the number of micro-batches per step, over all ranks.
    """

    def __init__(
        self,
        data: Dataset[Any] | Sized | int,
        batch_size: int,
        rank: int,
        world: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        per_step: int | None = None,
    ) -> None:
        """Create the sampler of one rank, at the start of epoch 0.

        Args:
            data: the dataset, whose length is read once, or the number of samples.
            batch_size: the number of samples in a micro-batch.
            rank: this rank's number among the ranks that train together (``optimizer.rank``).
            world: the number of these ranks (``optimizer.world_size``).
            seed: seed of the shuffled order. Torch's random generators are neither used nor changed.
            shuffle: give each epoch its own order; False: the order of the dataset.
            drop_last: end an epoch with its last complete step. False: deal all samples. The last micro-batch and the
                last step may then be smaller, and ranks may have different numbers of micro-batches, which
                ``optimizer.join()`` allows.
            per_step: the number of micro-batches per step, over all ranks. None: ``world``. Set it to keep the steps
                the same on another number of ranks; then set the optimizer's ``divisor`` to it as well.

        Raises:
            TypeError: the dataset has no length, or is a sampler or a loader; an argument is no whole number.
            ValueError: an argument is out of range, or an epoch has no step.
        """
        self.rank, self.world = _whole(rank, "rank", 0), _whole(world, "world", 1)
        if self.rank >= self.world:
            raise ValueError(f"rank must be less than world={self.world}, not {self.rank}: ranks are counted from 0")
        self.per_step = self.world if per_step is None else _whole(per_step, "per_step", 1)
        self._samples, self._batch_size = _length(data), _whole(batch_size, "batch_size", 1)
        self._seed, self._shuffle, self._drop_last = _whole(seed, "seed"), bool(shuffle), bool(drop_last)
        rounding = 0 if drop_last else self._batch_size - 1
        self._micro_batches = (self._samples + rounding) // self._batch_size
        self.epoch, self.trained = 0, 0
        self._resumed = self._dealt = self._counted = False  # by load_state_dict, by __iter__, by step
        if self.steps == 0:
            needed = f", which needs {self._batch_size * self.per_step}" if drop_last else ""
            raise ValueError(f"data has {self._samples} samples, too few for one step{needed}")

    @property
    def steps(self) -> int:
        """The number of steps in a whole epoch, the same on all ranks; a scheduler needs it times the epochs."""
        rounding = 0 if self._drop_last else self.per_step - 1
        return (self._micro_batches + rounding) // self.per_step

    def set_epoch(self, epoch: int, start: int | None = None) -> None:
        """Set the epoch of the next iteration. Call it before each epoch.

        Args:
            epoch: its number, at least 0.
            start: the number of micro-batches of this epoch that are already trained, over all ranks. None: the saved
                number after `load_state_dict`, if ``epoch`` is the saved epoch; otherwise 0.
        """
        epoch = _whole(epoch, "epoch", 0)
        if start is None:
            start = self.trained if self._resumed and epoch == self.epoch else 0
        if _whole(start, "start", 0) > self._micro_batches:
            raise ValueError(f"start must be at most {self._micro_batches}, the micro-batches of an epoch, not {start}")
        self.epoch, self.trained = epoch, start
        self._resumed = self._dealt = self._counted = False

    def step(self) -> None:
        """Count a step as trained. Call it after each ``optimizer.step()``, on every rank.

        Raises `RuntimeError` if the epoch has no step left.
        """
        left = self._left()
        if left == 0:
            raise RuntimeError(
                f"step() was called more often than epoch {self.epoch} has steps of {self.per_step} micro-batches: "
                "call it once after each optimizer.step(), and set_epoch() before each epoch"
            )
        self.trained += min(self.per_step, left)
        self._counted = True

    def __len__(self) -> int:
        """Return how many micro-batches an iteration deals to this rank from here on."""
        whole, rest = divmod(self._left(), self.per_step)
        return whole * self._share(self.per_step) + self._share(rest)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of the samples of each micro-batch of this rank, behind those that are trained.

        Of the epoch that is set when the first one is taken. Raises `RuntimeError` if all its steps were counted by
        `step`.
        """
        left = self._left()
        if self._counted and left == 0:
            raise RuntimeError(f"epoch {self.epoch} is trained: call set_epoch({self.epoch + 1}) before the next one")
        self._dealt = True
        order, begin, end = self._order(), self.trained, self.trained + left
        for first in range(begin, end, self.per_step):
            for number in range(first + self.rank, min(first + self.per_step, end), self.world):
                yield order[number * self._batch_size : (number + 1) * self._batch_size].tolist()

    # -- resuming -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return how far the epoch is trained, and what its order depends on, as plain values. Local.

        They are equal on all ranks between two steps. Once the epoch is complete, they describe the start of the next
        one. If ranks have different numbers of micro-batches, first call `set_epoch` for the next epoch. Raises
        `RuntimeError` if micro-batches were dealt and no `step` was counted.
        """
        if self._dealt and not self._counted:
            raise RuntimeError(
                f"micro-batches of epoch {self.epoch} were dealt, and no step was counted, so the state would not say "
                "what is trained: call step() after each optimizer.step()"
            )
        over = self._left() == 0
        return {"epoch": self.epoch + over, "trained": 0 if over else self.trained, **self._facts()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue behind the micro-batches that were trained when the state was saved, on any number of ranks. Local.

        Raises `ValueError`, and changes nothing, if the saved order was a different one.
        """
        mine = self._facts()
        if missing := [name for name in (*_OF_THE_ORDER, "epoch", "trained") if name not in state]:
            raise ValueError(f"the state has no {missing[0]!r}: give load_state_dict() what state_dict() returned")
        for name in _OF_THE_ORDER:
            if state[name] != mine[name]:
                raise ValueError(
                    f"the state was saved with {name}={state[name]}, and this sampler has {name}={mine[name]}: its "
                    "micro-batches are others. Build it with the saved value, or begin anew with set_epoch(epoch)"
                )
        self.set_epoch(state["epoch"], state["trained"])
        self._resumed = True

    def check_ranks(self, exchange: Callable[[bytes], list[bytes]]) -> None:
        """Compare the samplers of all ranks. All ranks.

        Args:
            exchange: a function that returns every rank's bytes, in rank order: ``optimizer.exchange``.

        Raises:
            ValueError: on every rank; it names the first argument that differs, and the rank.
        """
        place = {"epoch": self.epoch, "trained": self.trained, "rank": self.rank, "world": self.world}
        mine = json.dumps({**self._facts(), **place})
        replies = [json.loads(data) for data in exchange(mine.encode())]
        for rank, theirs in enumerate(replies):
            for name, expected in {**replies[0], "rank": rank, "world": len(replies)}.items():
                if theirs[name] != expected:
                    remedy = "build it with equal arguments on every rank, and with that rank's own number"
                    if name in ("epoch", "trained"):
                        remedy = "call set_epoch(epoch) on every rank before each epoch, and step() after each step"
                    raise ValueError(
                        f"rank {rank} of {len(replies)} has a sampler with {name}={theirs[name]} where {name}="
                        f"{expected} is expected: {remedy}"
                    )

    # -- the order ----------------------------------------------------------------------------------------------------

    def _facts(self) -> dict[str, Any]:
        return {
            "samples": self._samples,
            "batch_size": self._batch_size,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "drop_last": self._drop_last,
            "per_step": self.per_step,
        }

    def _left(self) -> int:
        """Return how many micro-batches of the epoch will be dealt to all ranks, behind those that are trained."""
        left = self._micro_batches - self.trained
        return left - left % self.per_step if self._drop_last else left

    def _share(self, count: int) -> int:
        """Return how many of the first ``count`` micro-batches of a step this rank has."""
        return len(range(self.rank, count, self.world))

    def _order(self) -> Tensor:
        """Return the samples in the order of the epoch, int64 on the CPU, whatever torch's default device."""
        if not self._shuffle:
            return torch.arange(self._samples, device="cpu")
        digest = hashlib.sha256(f"{self._seed} {self.epoch}".encode()).digest()  # seed + epoch would repeat orders
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little"))
        return torch.randperm(self._samples, generator=generator, device="cpu")


def _length(data: Dataset[Any] | Sized | int) -> int:
    if isinstance(data, Sampler | DataLoader):
        raise TypeError(f"data is a {type(data).__name__}, whose order would be lost: give the dataset, or its length")
    if isinstance(data, Sized):
        return len(data)
    try:
        return _whole(data, "data", 0)
    except TypeError:
        raise TypeError(
            f"{type(data).__name__} has no length: give a dataset with __len__ and __getitem__, or the number of "
            "samples. An IterableDataset chooses its samples itself, on each rank"
        ) from None


def _whole(value: Any, name: str, least: int | None = None) -> int:
    """Return an argument as a whole number. Raises TypeError or ValueError naming it."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {value!r}") from None
    if least is not None and number < least:
        raise ValueError(f"{name} must be at least {least}, not {number}")
    return number
