"""A lock around torch's default random generator, for ranks that are threads: around each call, and around each block
of `torch.random.fork_rng` that builds something, from whose numbers another rank would draw.

`Generator.get_state` holds the generator's lock while it creates a Python object. A garbage collection at that moment
may free a tensor and switch to another thread. If that thread calls the generator, it waits for the generator's lock
and keeps the interpreter's, for which the first thread waits: the process hangs, and handles no signal (torch 2.13).
In a rank's own process, and in a plain loop, only one thread calls the generator.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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

    fork_rng = torch.random.fork_rng

    @contextmanager
    def forked(*arguments: Any, **named: Any) -> Iterator[None]:
        recomputes = "enabled" in named  # `torch.utils.checkpoint`, where ranks meet in gathers
        with nullcontext() if recomputes else lock, fork_rng(*arguments, **named):
            yield

    patch.setattr(torch.random, "fork_rng", forked)
    for name in CALLS:
        wrapped = alone(getattr(torch, name))
        for module in (torch, torch.random):
            patch.setattr(module, name, wrapped)
