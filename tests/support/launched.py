"""Run a block of zero/recipes as `torchrun` would: after the block `Start`, in one process per rank."""

from __future__ import annotations

import importlib
import os
import traceback
from pathlib import Path
from typing import Any

import torch

from .loops import code_of
from .processes import Group, reserved_port

WORLD_SIZE = 2


def launch(function: str, folder: Path, *words: str, limit: float = 100, ranks: int = WORLD_SIZE) -> Any:
    """Call ``function``, "module:name", in so many processes, with the variables of `Start`, a folder and words; return
    rank 0's result."""
    with reserved_port() as port:
        environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",  # forbid downloads
        }
        group = Group(rank_of, ranks, (function, folder, words, environment))
        try:
            for rank in range(ranks):
                error = group.hear(rank, limit)
                assert not error, f"rank {rank}:\n{error}"
        finally:
            group.end(5.0)
    return torch.load(folder / "result.pt", weights_only=False)


def rank_of(rank: int, pipe: Any, _: int, case: tuple[str, Path, tuple[str, ...], dict[str, str]]) -> None:
    function, folder, words, environment = case
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    started: dict[str, Any] = {}
    try:
        exec(code_of("Start"), started)
        module, _, name = function.partition(":")
        result = getattr(importlib.import_module(module), name)(started, folder, *words)
        if rank == 0:
            torch.save(result, folder / "result.pt")
    except BaseException:
        pipe.send(traceback.format_exc())
    else:
        pipe.send("")
