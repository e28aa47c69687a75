"""A lock around torch's default random generator, for ranks that are threads.

`Generator.get_state` holds the generator's lock while it creates a Python object. A garbage collection at that moment
may free a tensor and switch to another thread. If that thread calls the generator, it waits for the generator's lock
and keeps the interpreter's, for which the first thread waits: the process hangs, and handles no signal (torch 2.13,
reproduced by `python -m tests.support.generator`). In a rank's own process, and in a plain loop, only one thread calls
the generator.

Knows: the functions of torch that call the default generator. Does not know: ranks.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

CALLS = ("get_rng_state", "set_rng_state", "manual_seed", "seed", "initial_seed")


def one_call_at_a_time(patch: pytest.MonkeyPatch) -> None:
    """Wrap the generator's functions in a Python lock: a thread that waits for it releases the interpreter."""
    lock = threading.RLock()

    def alone(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            with lock:
                return call(*arguments, **named)

        return wrapped

    for name in CALLS:
        wrapped = alone(getattr(torch, name))
        for module in (torch, torch.random):
            patch.setattr(module, name, wrapped)


def collide(rounds: int = 500) -> None:
    """Save and restore the generator's state on several threads, with a garbage collection each time."""

    class Cycle:
        held: Any

    def work() -> None:
        for _ in range(rounds):
            cycle = Cycle()
            cycle.held = [cycle, *(torch.ones(64) for _ in range(20))]
            del cycle
            gc.set_threshold(1, 1, 1)
            state = torch.get_rng_state()
            gc.set_threshold(100_000, 1, 1)
            torch.set_rng_state(state)

    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    if sys.argv[1:] == ["alone"]:
        one_call_at_a_time(pytest.MonkeyPatch())
    collide()
