"""The parts of a training step as a profiler and the logger ``zero`` show them.

An event has the name of one kind of work on one bucket or unit of one rank. While it runs, `torch.profiler` shows a
range of that name; where the logger has DEBUG on, it writes one line as the event begins. Names are made once, when
buckets and units are registered, and no event belongs to a single parameter.

    zero::unshard unit U               launch the all-gathers of a unit
    zero::wait_for_unshard unit U      wait for them
    zero::install unit U               the parameters become views of what was gathered
    zero::reshard unit U               release the parameters and give the memory back
    zero::uninstall unit U             release the parameters, and keep what was gathered
    zero::reduce_scatter bucket B      copy the gradients of a bucket, and launch their reduce-scatter
    zero::wait_for_reduce_scatter ...  wait for it, and add up in rank order
    zero::all_gather_gradients ...     stage 0: launch the all-gather of the means, and `wait_for_...`
    zero::agree                        compare what the ranks hold; a rank that is behind catches up
    zero::catch_up                     a reduction of the other ranks' for which this rank ran no backward
    zero::unscale, zero::clip          the whole call
    zero::step                         the whole step, with these inside:
      zero::update bucket B            the optimizer class on this rank's interval of a bucket
      zero::all_gather bucket B        stages 1 and 2: launch the all-gather of its parameters, and `wait_for_...`
      zero::prefetch, evict bucket B   `offload`: states of a bucket come, and go

Does not know: buckets, units, ranks.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import Any

from torch.autograd import profiler
from torch.profiler import record_function

from collectives import Work

LOG = logging.getLogger("zero")
_OF_PROFILER = vars(profiler)


class Event:
    """One kind of work, as in ``with event(): ...``."""

    __slots__ = ("_range", "_rank", "_what")

    def __init__(self, what: str, rank: str) -> None:
        """``what``: the name of the range, less "zero::"; ``rank``: what a line calls this rank."""
        self._what, self._range, self._rank = what, f"zero::{what}", rank

    def __call__(self) -> AbstractContextManager[Any]:
        """Begin the event. What is returned ends it."""
        if LOG.isEnabledFor(logging.DEBUG):
            LOG.debug("%s: %s", self._rank, self._what)
        # To enter a range costs 5 µs where no profiler runs, to read this flag a hundredth of that. torch has no public
        # name for it; without the private one every range is entered.
        return record_function(self._range) if _OF_PROFILER.get("_is_profiler_enabled", True) else _NOTHING


class _Nothing:
    """A `contextlib.nullcontext` at two thirds of the cost."""

    __slots__ = ()

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        return


_NOTHING = _Nothing()


class Waited:
    """A collective under way whose wait is an event."""

    def __init__(self, work: Work, event: Event) -> None:
        self._work, self._event = work, event

    def wait(self) -> None:
        with self._event():
            self._work.wait()
