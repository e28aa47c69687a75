"""Groups of processes that run a program of a rank each, over a store, and send what they see through a pipe."""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = 60.0  # seconds for processes to start and to end


class Group:
    """The processes of a case's ranks, forks of one that has imported a program's module.

    Each calls ``program`` with its rank, its end of a pipe, the port of a store, and the case.
    """

    def __init__(self, program: Callable[..., None], ranks: int, case: Any, start_method: str = "forkserver") -> None:
        self.case = case
        context: Any = multiprocessing.get_context(start_method)
        context.set_forkserver_preload([program.__module__, "torch._dynamo"])  # the first optimizer imports the second
        self._store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        self.pipes: list[Any] = []
        self.processes: list[Any] = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            arguments = (program, rank, theirs, self._store.port, case)
            process = context.Process(target=_on_one_thread, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def hear(self, rank: int, limit: float = PATIENCE) -> Any:
        """Return what a rank sends next. Raises `EOFError` if it has ended."""
        if not self.pipes[rank].poll(limit):
            raise TimeoutError(f"{self.case}: rank {rank} hangs")
        return self.pipes[rank].recv()

    def end(self, patience: float = PATIENCE) -> list[int | None]:
        """Close the pipes, upon which the processes return; kill one that does not. Return the exit codes."""
        for pipe in self.pipes:
            pipe.close()
        end = time.monotonic() + patience
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
            process.join()
        return codes


def _on_one_thread(program: Callable[..., None], *arguments: Any) -> None:
    torch.set_num_threads(1)
    program(*arguments)


@contextmanager
def reserved_port() -> Iterator[int]:
    """Give a port that the system gives to no other process inside the block, and on which a store may listen: both
    sockets say that they share the address."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", 0))
        yield probe.getsockname()[1]
