"""Run a block of zero/recipes as `torchrun` would: after the block `Start`, in one process per rank.

``python -m tests.support.launched MODULE:FUNCTION FILE WORD...`` runs that block, and passes its variables, the folder
of FILE and the words to the function. Rank 0 writes the function's result to FILE.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from .loops import ROOT, code_of
from .processes import reserved_port

WORLD_SIZE = 2


def launch(function: str, folder: Path, *words: str, limit: float = 100, ranks: int = WORLD_SIZE) -> Any:
    """Run ``function`` in two processes, or in so many ``ranks``; return rank 0's result."""
    with reserved_port() as port:
        environment = os.environ | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",  # forbid downloads
        }
        command = [sys.executable, "-m", "tests.support.launched", function, str(folder / "result.pt"), *words]
        processes = [
            subprocess.Popen(
                command,
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(ranks)
        ]
        try:
            said = [process.communicate(timeout=limit)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    for rank, (process, text) in enumerate(zip(processes, said, strict=True)):
        assert process.returncode == 0, f"rank {rank} ended with {process.returncode}:\n{text}"
    return torch.load(folder / "result.pt", weights_only=False)


def main(function: str, file: str, *words: str) -> None:
    torch.set_num_threads(1)
    started: dict[str, Any] = {}
    exec(code_of("Start"), started)
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(started, Path(file).parent, *words)
    if started["rank"] == 0:
        torch.save(result, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
