"""A checkpoint is read, and trained on, in a process that has neither of our packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from collectives import Transport, on_threads
from zero import ZeroOptimizer, open_checkpoint, save

from ...checkpoint.runs import Topology, run, step_folder
from ...support.ports import reserved_port
from .without_us_fsdp2 import network, train

pytestmark = pytest.mark.contract

ROOT = Path(__file__).resolve().parents[3]


def test_plain_torch_trains_on_with_our_bits(tmp_path: Path) -> None:
    run(tmp_path / "run", Topology(3, 3, 0.0005), 2)
    expected = run(tmp_path / "whole", Topology(2, 2, 0.0005), 5)
    command = [sys.executable, "-m", "tests.ci.checkpoint.without_us", str(step_folder(tmp_path / "run", 2)), "3", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == expected
    assert open_checkpoint(step_folder(tmp_path / "whole", 5)).step == 5


def test_fsdp2_trains_on_with_our_bits(tmp_path: Path) -> None:
    def program(transport: Transport) -> str:
        model = network(0)
        optimizer = ZeroOptimizer(
            model, torch.optim.AdamW, stage=3, process_group=transport, lr=0.01, betas=(0.8, 0.9), weight_decay=0.1
        )
        train(model, optimizer, transport.rank, range(2))
        save(tmp_path / "saved", optimizer, step=2)
        train(model, optimizer, transport.rank, range(2, 5))
        return optimizer.check_replicas()

    expected, _ = on_threads(2, program)
    with reserved_port() as port:
        world = os.environ | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "tests.ci.checkpoint.without_us_fsdp2", str(tmp_path / "saved"), "3", "2"]
        ranks = [
            subprocess.Popen(
                command, cwd=ROOT, env=world | {"RANK": rank}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for rank in ("0", "1")
        ]
        try:
            told = [rank.communicate(timeout=120) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], told
    assert told[0][0].strip() == expected
