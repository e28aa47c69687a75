"""The device that a benchmark for a GPU runs on, checked and in words.

As a program, `python -m benchmarks.gpu_device cuda:0`, it prints the words. What asks so takes no memory of the GPU.

Knows: torch's names of devices. Does not know: benchmarks.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import typer

GIB = 1 << 30
ROOT = Path(__file__).resolve().parent.parent
LIMIT = 120.0  # seconds in which a process imports torch and finds the GPU


def checked_device(name: str) -> torch.device:
    """Return a device by its name, with a number. End the program with code 2 if there is no CUDA for it."""
    if name.startswith("cuda") and not torch.cuda.is_available():
        print(
            "error: there is no CUDA here: this benchmark needs a GPU (--device cpu --quick: to see that it works)",
            file=sys.stderr,
        )
        raise typer.Exit(2)
    return torch.device("cuda:0" if name == "cuda" else name)


def in_words_apart(device: torch.device) -> str:
    """Return what `in_words` returns in another process."""
    command = [sys.executable, "-m", "benchmarks.gpu_device", str(device)]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=LIMIT).stdout.strip()


def in_words(device: torch.device) -> str:
    """Return the name and the memory of a GPU, and the versions of CUDA and NCCL."""
    if device.type != "cuda":
        return "no GPU: the CPU in its place"
    cuda: Any = torch.cuda  # torch annotates only a part of it
    properties, nccl = cuda.get_device_properties(device), ".".join(map(str, cuda.nccl.version()))
    return f"{properties.name}, {properties.total_memory / GIB:.0f} GiB, CUDA {torch.version.cuda}, NCCL {nccl}"


if __name__ == "__main__":
    print(in_words(torch.device(sys.argv[1])))
