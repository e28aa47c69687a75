"""A signal to one rank stops all ranks after the same step, and the same command goes on."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from collectives import Transport, on_threads
from zero import StopOnSignal, ZeroOptimizer
from zero.commands import cli
from zero.commands.train.rank import RankTraining

from ..support.parts import parts_of
from ..support.torchrun import Cadence

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("no_launcher")


@pytest.fixture
def caught() -> Iterator[list[int]]:
    """Return the SIGTERMs that this process gets during a test."""
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    yield got
    signal.signal(signal.SIGTERM, before)


def test_all_ranks_hear_of_a_signal_to_one_of_them_in_the_same_step(caught: list[int]) -> None:
    def program(transport: Transport) -> list[str | None]:
        model = nn.Linear(2, 2)
        optimizer = ZeroOptimizer(model, torch.optim.SGD, stage=2, process_group=transport, lr=0.1)
        heard = []
        with StopOnSignal(optimizer, signals=()) as stop:  # a thread handles none
            for step in range(3):
                model(torch.ones(2)).sum().backward()
                if (step, transport.rank) == (1, 2):
                    stop._on_signal(signal.SIGTERM, None)
                optimizer.step()
                optimizer.zero_grad()
                heard.append(stop.why)
        assert not parts_of(optimizer).update.watchers
        return heard

    assert on_threads(3, program) == [[None, "rank 2 got SIGTERM", "rank 2 got SIGTERM"]] * 3


def test_inside_the_block_a_signal_does_not_end_the_process_and_after_it_what_was_there_handles_it(
    caught: list[int],
) -> None:
    model = nn.Linear(2, 2)
    optimizer = ZeroOptimizer(model, torch.optim.SGD, lr=0.1)
    with StopOnSignal(optimizer) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert not stop.requested
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        assert stop.requested
    assert caught == []
    with StopOnSignal(optimizer) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
    assert not stop.requested
    assert caught == [signal.SIGTERM], "no step came after it, so the process gets it at the end of the block"

    def lose_the_others() -> None:
        with StopOnSignal(optimizer):
            os.kill(os.getpid(), signal.SIGTERM)
            raise KeyError("what a rank reports that has lost the others, although its agent has sent SIGTERM")

    with pytest.raises(KeyError):
        lose_the_others()
    assert caught == [signal.SIGTERM]


def test_what_no_process_can_handle_is_an_error_that_names_it() -> None:
    optimizer = ZeroOptimizer(nn.Linear(2, 2), torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="signals has SIGKILL, which no process can handle: leave it out"):
        StopOnSignal(optimizer, [signal.SIGTERM, signal.SIGKILL])
    errors: list[Exception] = []

    def enter() -> None:
        try:
            StopOnSignal(optimizer).__enter__()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])


@pytest.mark.usefixtures("bare")
def test_a_signal_to_the_only_rank_saves_the_step_and_the_same_command_goes_on(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cadence = Cadence(steps=6, micro_batches=2, every=100, more=("--sequence=24", f"--data={text}"))
    backwards = RankTraining._backwards

    def ended(self: RankTraining, step: int) -> list[float]:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return backwards(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(RankTraining, "_backwards", ended)
        assert cli.main(["--ranks=1", *cadence.flags(tmp_path / "a", 2)], "train") == 128 + signal.SIGTERM
    assert "stopped: rank 0 got SIGTERM: all ranks have saved step 4 and end" in capsys.readouterr().err
    assert cli.main(["--ranks=1", *cadence.flags(tmp_path / "a", 2)], "train") == 0
    assert "goes on from step 4 on 1 rank" in capsys.readouterr().out
    assert cli.main(["--ranks=1", *cadence.flags(tmp_path / "b", 2)], "train") == 0
    found, undisturbed_run = (json.loads((tmp_path / name / "out" / "run.json").read_text()) for name in "ab")
    assert found["params_sha256"] == undisturbed_run["params_sha256"]
    assert found["losses"] == undisturbed_run["losses"]
