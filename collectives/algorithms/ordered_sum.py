"""The sum in rank order, ((a + b) + c) + ...: the sum of a single process that adds in that order.

A side stream of a device, on which contributions are added while the launching stream goes on.

    launch    the stream aside waits for the current one; additions are enqueued there, behind the collective
    wait      the current stream waits for these additions

So the current stream, a backward's, goes on between the two. Memory belongs to the current stream. A work refers to all
memory that the stream aside uses until its wait: then what is enqueued next may use the memory again.

Knows: tensors, streams. Does not know: where contributions come from.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..kernels import kernels_of
from ..transport import Transport, as_a_whole
from .base import ADDING_UP, Launched

BLOCK = 1 << 16  # elements; the running sum of a block stays in the cache while the parts stream through it
DEVICE_BLOCK = 1 << 26  # on an accelerator without kernels, where a launch costs more than a cache saves


def ordered_sum(parts: Sequence[Tensor], out: Tensor) -> None:
    """Write ``((parts[0] + parts[1]) + parts[2]) + ...`` to ``out``, each sum rounded to ``out``'s dtype.

    All tensors are 1-D of one length; a part of two dimensions stands for its rows. ``out`` may be one of the parts, or
    share exactly its memory. Nothing else is written. A device with kernels adds three parts or more, or two of
    different dtypes, in one launch.
    """
    count = sum(part.shape[0] if part.dim() == 2 else 1 for part in parts)
    in_one_launch = count > 2 or (count == 2 and parts[0].dtype != out.dtype)
    kernels = kernels_of(out.device) if in_one_launch else None
    if kernels is not None and kernels.can_sum(parts, out):
        kernels.ordered_sum(parts, out)
        return
    parts = [row for part in parts for row in (part.unbind() if part.dim() == 2 else (part,))]
    first, size = parts[0], out.numel()
    if count == 1:
        if first.data_ptr() != out.data_ptr() or first.dtype != out.dtype:
            out.copy_(first)
        return
    if not in_one_launch:
        torch.add(first, parts[1], out=out)
        return
    block = BLOCK if out.device.type == "cpu" else DEVICE_BLOCK
    running = torch.empty(min(block, size), dtype=out.dtype, device=out.device)
    if size <= block:
        _sum_block(parts, out, running)
        return
    for begin in range(0, size, block):
        end = min(begin + block, size)
        _sum_block([part[begin:end] for part in parts], out[begin:end], running[: end - begin])


def _sum_block(parts: Sequence[Tensor], out: Tensor, total: Tensor) -> None:
    if parts[0].dtype == out.dtype:
        torch.add(parts[0], parts[1], out=total)
    else:
        total.copy_(parts[0]).add_(parts[1])
    for part in parts[2:-1]:
        total.add_(part)
    if len(parts) > 2:
        torch.add(total, parts[-1], out=out)
    else:
        out.copy_(total)


class Aside:
    """The streams aside of one algorithm, one for each device, made when it is first asked for."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream | None] = {}

    def of(self, device: torch.device) -> torch.Stream | None:
        """Return the stream aside of a device; None on the CPU."""
        if device not in self._streams:
            self._streams[device] = _made(device)
        return self._streams[device]


def _made(device: torch.device) -> torch.Stream | None:
    """Return a new stream, whose short kernels go before those of a backward: others wait for their results."""
    return None if device.type == "cpu" else torch.Stream(device, priority=-1)


@runtime_checkable
class AddsAside(Protocol):
    """An algorithm that adds up on a stream aside, so that it reads the sum so far at the launch."""

    def add_in_wait(self) -> None:
        """From now on add in the wait, where the sum so far is read, too."""


@contextmanager
def enqueued(stream: torch.Stream, device: torch.device) -> Iterator[None]:
    """Return the context of work that is enqueued on a stream aside, behind all work of the current stream so far."""
    stream.wait_stream(torch.accelerator.current_stream(device))
    with stream:
        yield


def end_of(owner: object, stream: torch.Stream, device: torch.device) -> Callable[[], object]:
    """Return a call that orders the current stream behind the work that a stream aside has now. Further calls do
    nothing. When ``owner``, which refers to the memory in use, is given up without a wait, the stream that is current
    now is ordered so, to which the memory belongs: Python may collect garbage in any thread."""
    event = stream.record_event()
    given_up = weakref.finalize(owner, torch.accelerator.current_stream(device).wait_event, event)
    given_up.atexit = False

    def end() -> None:
        if given_up.detach() is not None:
            torch.accelerator.current_stream(device).wait_event(event)

    return end


class AddedAside:
    """A collective whose end and additions are enqueued on a stream aside at the launch, without a wait of the host."""

    def __init__(
        self, transport: Transport, work: Launched, stream: torch.Stream, device: torch.device, held: object
    ) -> None:
        """``held``: refers to all memory that the work uses."""
        self._transport, self._announced, self._held = transport, work.announced, held
        with as_a_whole(transport, ADDING_UP), enqueued(stream, device):
            work.running.wait()
        self._end = end_of(self, stream, device)

    def wait(self) -> None:
        self._announced.wait()
        self._end()
        self._held = None
        self._transport.check()
