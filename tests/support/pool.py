"""A pool of real gloo processes, started once for the whole test session.

The processes are forks of one that has imported torch, as the import takes most of the time. Running a program on the
pool then takes a few milliseconds. A program is an importable function ``program(group, rank, *arguments)``. It runs on
the ranks of ``ranks`` (of the pool's four), with a process group of exactly these, and returns something picklable.
After a time limit or the loss of a process the pool is discarded, and the next program gets a new one.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch
import torch.distributed as dist

from .processes import Group

SIZE = 4
GROUPS = ((0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (1, 3), (1,), (2,), (3,), (0, 2), (2, 3))  # and all
GROUP_TIMEOUT = 60.0 if torch.cuda.is_available() else 20.0  # seconds; a first program also makes CUDA contexts
PATIENCE = 10.0  # seconds in which an idle process returns, including the end of a coverage measurement


WITHOUT_GLOO = "cuda:unmoving"
"""A backend that moves no tensors of the CPU, as NCCL does not."""

MADE: dict[tuple[int, ...], Any] = {}
"""In a process of the pool: its process groups, by their ranks."""


class ProgramError(Exception):
    """The errors of a program: ``errors`` maps a global rank to (name of the class, message)."""

    def __init__(self, errors: dict[int, tuple[str, str]], text: str) -> None:
        super().__init__(text)
        self.errors = errors


def _serve(rank: int, pipe: Connection, port: int, case: tuple[str, int]) -> None:
    backend, size = case
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(rank), WORLD_SIZE=str(size), OMP_NUM_THREADS="1")
    if "nccl" in backend:  # which refuses two ranks of one host on one GPU: it takes each for a host
        os.environ.update(NCCL_HOSTID=f"host-{rank}", NCCL_NET="Socket", NCCL_SOCKET_IFNAME="lo")
    faulthandler.enable()  # a process that torch ends says where
    if backend == WITHOUT_GLOO:
        register_unmoving()
    store, limit = dist.TCPStore("127.0.0.1", port, None, is_master=False), timedelta(seconds=GROUP_TIMEOUT)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    known = dict.fromkeys((*GROUPS, tuple(range(size))))
    MADE.update({ranks: dist.new_group(ranks, timeout=limit) for ranks in known})
    pipe.send("ready")
    while True:
        try:
            module, name, ranks, arguments = pipe.recv()
        except EOFError:
            return
        try:
            program = getattr(importlib.import_module(module), name)
            group = MADE[ranks]
            pipe.send(("result", program(group, dist.get_rank(group), *arguments)))
        except BaseException as error:
            pipe.send(("error", (type(error).__name__, str(error), traceback.format_exc())))


def register_unmoving() -> None:
    """Let torch know the backend of `WITHOUT_GLOO` in this process."""

    def make(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        time = (store.add("unmoving", 1) - 1) // size
        return dist.ProcessGroupGloo(dist.PrefixStore(f"unmoving/{time}", store), rank, size, timeout)  # type: ignore[attr-defined]

    if not hasattr(dist.Backend, "UNMOVING"):
        dist.Backend.register_backend("unmoving", make, devices=["cuda"])


class GlooPool:
    """Runs programs on long-lived processes. With the start method "spawn" they share no memory, and start slowly."""

    def __init__(
        self, start_method: Literal["forkserver", "spawn"] = "forkserver", backend: str = "gloo", size: int = SIZE
    ) -> None:
        self._start_method, self._backend, self._size = start_method, backend, size
        self._group: Group | None = None

    def run(
        self, program: Callable[..., Any], *arguments: Any, ranks: Sequence[int] = (0, 1), limit: float = 60
    ) -> Any:
        """Run ``program`` on ``ranks``. Return the results in their order, or raise `ProgramError`."""
        chosen = tuple(ranks)
        results: dict[int, Any] = {}
        errors: dict[int, tuple[str, str, str]] = {}
        group = self._started()
        try:
            for rank in chosen:
                group.pipes[rank].send((program.__module__, program.__name__, chosen, arguments))
            end = time.monotonic() + limit
            for rank in chosen:
                kind, value = group.hear(rank, max(0.0, end - time.monotonic()))
                (results if kind == "result" else errors)[rank] = value
        except TimeoutError:
            self.stop()
            raise
        except (EOFError, ConnectionResetError):
            self.stop()
            raise RuntimeError(f"the process of rank {rank} died") from None
        if errors:
            if any("no answer from rank" in message for _, message, _ in errors.values()):
                self.stop()  # gloo closes a group's connections when a time limit passes
            text = "\n".join(f"rank {rank}:\n{trace}" for rank, (_, _, trace) in errors.items())
            raise ProgramError({rank: (name, message) for rank, (name, message, _) in errors.items()}, text)
        return [results[rank] for rank in chosen]

    def stop(self) -> None:
        if self._group is not None:
            self._group.end(PATIENCE)
        self._group = None

    def _started(self) -> Group:
        if self._group is None:
            self._group = Group(_serve, self._size, (self._backend, self._size), self._start_method)
            try:
                for rank in range(self._size):
                    self._group.hear(rank, 120)
            except (TimeoutError, EOFError):
                self.stop()  # the next program starts them anew
                raise
        return self._group


def stop_forkserver() -> None:
    """End the process from which the pools fork: after this one it would end too late for a measurement of coverage."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
