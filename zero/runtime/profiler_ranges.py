"""Ranges for torch's profiler and log lines for the logger ``zero``, one for each part of a training step.

An event has the name of one kind of work on one bucket or unit of one rank. While it runs, `torch.profiler` shows a
range of that name. If the logger is at DEBUG, one line is written when the event begins. Names are made once, when
buckets and units are registered. No event belongs to a single parameter.

    zero::unshard unit U               launch the all-gathers of a unit
    zero::wait_for_unshard unit U      wait for them
    zero::install unit U               give the parameters their values
    zero::reshard unit U               release the parameters and free the buffer
    zero::uninstall unit U             release the parameters of a unit that was gathered, and keep the buffer
    zero::reduce_scatter bucket B      copy the gradients of a bucket, and launch their reduce-scatter
    zero::wait_for_reduce_scatter ...  wait for it, and add up in rank order
    zero::pass_on_reduce_scatter ...   with `sharding_factor`: add up in rank order, and send the sum on
    zero::all_gather_gradients ...     stage 0: launch the all-gather of the means, and `wait_for_...`
    zero::agree                        compare the ranks' records; a rank that is behind catches up
    zero::catch_up                     a reduction of the other ranks for which this rank ran no backward
    zero::unscale, zero::clip          the whole call
    zero::step                         the whole step, with these inside:
      zero::update bucket B            the optimizer class on this rank's interval of a bucket; on accelerators of a
                                       group of buckets, of which B is the first
      zero::all_gather bucket B        stages 1 and 2: launch the all-gather of its parameters, and `wait_for_...`
      zero::prefetch, evict bucket B   `offload`: read the states of a bucket, and write them back

Does not know: buckets, units, ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.autograd import profiler
from torch.profiler import record_function

from collectives import Work, pass_on

LOG = logging.getLogger("zero")
_OF_PROFILER = vars(profiler)


class ProfilerRange:
    """One kind of work, used as ``with event(): ...``."""

    __slots__ = ("_range", "_rank", "_what")

    def __init__(self, what: str, rank: str) -> None:
        """``what``: the name of the range without "zero::"; ``rank``: the label of this rank in log lines."""
        self._what, self._range, self._rank = what, f"zero::{what}", rank

    def __call__(self) -> AbstractContextManager[Any]:
        """Begin the event, and return the context that ends it."""
        if LOG.isEnabledFor(logging.DEBUG):
            LOG.debug("%s: %s", self._rank, self._what)
        # Without a profiler, entering a range costs 5 µs and reading this flag a hundredth of that. torch has no public
        # name for the flag. If the private name is missing, every range is entered.
        return record_function(self._range) if _OF_PROFILER.get("_is_profiler_enabled", True) else NOTHING


class _Nothing:
    """A context that does nothing, at two thirds of the cost of `contextlib.nullcontext`."""

    __slots__ = ()

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        return


NOTHING = _Nothing()


class Waited:
    """A collective in flight whose wait is an event."""

    def __init__(self, work: Work, event: ProfilerRange) -> None:
        self._work, self._event = work, event

    def wait(self) -> None:
        with self._event():
            self._work.wait()


class WaitedInStages:
    """A `StagedWork` in flight whose two waits are events, each followed by a call of its own.

    Each wait may be repeated, also after an interrupt.
    """

    def __init__(
        self,
        work: Work,
        passing: ProfilerRange,
        passed_on: Callable[[], None],
        waiting: ProfilerRange,
        done: Callable[[], None],
    ) -> None:
        self._work, self._done = work, False
        self._passing, self._passed_on, self._waiting, self._then = passing, passed_on, waiting, done

    def pass_on(self) -> None:
        if not self._done:
            with self._passing():
                pass_on(self._work)
            self._passed_on()

    def wait(self) -> None:
        if not self._done:
            with self._waiting():
                self._work.wait()
            self._then()
            self._done = True
