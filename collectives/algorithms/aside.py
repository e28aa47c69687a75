"""A side stream of a device, on which contributions are added while the launching stream goes on.

    launch    the stream aside waits for the current one; additions are enqueued there, behind the collective
    wait      the current stream waits for these additions

So the current stream, a backward's, goes on between the two. Memory belongs to the current stream. A work refers to all
memory that the stream aside uses until its wait: then what is enqueued next may use the memory again.

Knows: streams. Does not know: what is enqueued.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch

from ..transport import Transport, as_a_whole
from .base import ADDING_UP, Launched


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
    """An algorithm that adds up on a stream aside, so that it reads the sum so far at the launch; with None it does so
    in the wait."""

    aside: Aside | None


@contextmanager
def enqueued(stream: torch.Stream, device: torch.device) -> Iterator[None]:
    """Return the context of work that is enqueued on a stream aside, behind all work of the current stream so far."""
    stream.wait_stream(torch.accelerator.current_stream(device))
    with stream:
        yield


def end_of(owner: object, stream: torch.Stream, device: torch.device) -> Callable[[], object]:
    """Return a call that orders the current stream behind the work that a stream aside has now. Further calls do
    nothing. It is also made when ``owner``, which refers to the memory in use, is given up without a wait."""
    end = weakref.finalize(owner, _follow, stream.record_event(), device)
    end.atexit = False
    return end


def _follow(event: torch.Event, device: torch.device) -> None:
    torch.accelerator.current_stream(device).wait_event(event)


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
