"""`StopOnSignal`: a signal to one rank, of which all ranks learn in the same step, so that they can save and end.

Knows: signal handlers, and the short texts that travel with the agreement of each step. Does not know: saves.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any

from ..optimizer import ZeroOptimizer
from ..runtime.compiled_calls import untraced_methods
from .sharded_optimizer import ShardedOptimizer

_REPORT = "stop"  # the name of the report


@untraced_methods
class StopOnSignal:
    """Records signals that ask the process to end, so that all ranks can save and stop after the same step.

    Every rank builds one for its own optimizer, in its main thread, and uses it as a ``with`` block around its steps.
    Inside the block the signals do not end the process. Each ``step()`` passes a request on to all ranks, with data
    that they exchange anyway, so it costs no message. A signal after that exchange is passed on in the next step. If no
    step follows, the process gets the signal again at the end of the block, unless an error ends the block.

    Attributes:
        why: which rank got which signal, as text; None if there is no request. Equal on all ranks between two steps.
    """

    def __init__(self, optimizer: ZeroOptimizer, signals: Sequence[signal.Signals] = (signal.SIGTERM,)) -> None:
        """Choose the signals. Local; raises `ValueError` for a signal that cannot be handled."""
        wrong = [number for number in signals if number in (signal.SIGKILL, signal.SIGSTOP)]
        if wrong:
            raise ValueError(f"signals has {wrong[0].name}, which no process can handle: leave it out")
        self._parts, self._signals = ShardedOptimizer(optimizer), tuple(signals)
        self._before: dict[signal.Signals, Any] = {}
        self._received: signal.Signals | None = None  # by this process
        self.why: str | None = None

    @property
    def requested(self) -> bool:
        """Whether the ranks should stop. Equal on all ranks between two steps. Local."""
        return self.why is not None

    def before_step(self, reports: Sequence[Mapping[str, str]]) -> None:
        """Note the signals of all ranks. Called in each step. Internal."""
        for rank, report in enumerate(reports):
            if _REPORT in report and self.why is None:
                self.why = f"rank {rank} got {report[_REPORT]}"

    def before_update(self, bucket: int) -> None:
        """States may change. Internal."""

    def __enter__(self) -> StopOnSignal:
        """Listen. Raises `ValueError` outside the main thread, the only one that may handle signals."""
        for number in self._signals:
            self._before[number] = signal.signal(number, self._on_signal)
        self._parts.watchers.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        self._parts.watchers.remove(self)
        self._parts.report(_REPORT, None)
        if self._received is not None and self.why is None and error is None:
            signal.raise_signal(self._received)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._received = signal.Signals(number)
        self._parts.report(_REPORT, self._received.name)
