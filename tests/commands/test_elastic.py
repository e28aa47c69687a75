"""Ranks die, leave and come under torchrun: `tests.elastic` in small, the script of ELASTIC.md, and signals."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from collectives import Transport, on_threads
from zero import StopOnSignal, ZeroOptimizer
from zero.commands import cli
from zero.commands.train.rank import RankTraining

from ..elastic import BEGUN, CADENCE, LIMIT, STOPPED, check_disturbed, check_outcome, elastic_job, send, training
from ..resumes import Cadence, TrainedRun, undisturbed
from ..support.parts import parts_of
from ..support.plain import bits

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("no_launcher")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    return undisturbed(CADENCE, tmp_path_factory.mktemp("undisturbed"))


# ------------------------------------------------------------------------------------------------- under torchrun


@pytest.mark.full
@pytest.mark.timeout(LIMIT)
def test_four_three_one_and_five_ranks_end_with_the_bits_of_an_undisturbed_run(
    tmp_path: Path, expected: TrainedRun
) -> None:
    """An agent gets SIGTERM, which loses no step; an agent is killed, and another one with its worker; four come."""
    with elastic_job(tmp_path, training(tmp_path, stage=3)) as job:
        job.add(4)
        assert job.until(lambda: job.saved() >= 10), job.log()
        job.staying[0].leave()
        assert job.until(lambda: BEGUN.search(job.log())), job.log()
        stopped, begun = STOPPED.search(job.log()), BEGUN.search(job.log())
        assert stopped is not None, job.log()
        assert begun is not None
        assert (stopped[2], "3") == (begun[1], begun[2])
        first, second, _ = job.staying
        send([first.pid, second.pid, *second.workers()], signal.SIGKILL)
        assert job.until(lambda: re.search(r"goes on from step \d+ on 1 rank", job.log())), job.log()
        (last,) = job.staying
        send(last.workers(), signal.SIGSTOP)  # it would finish while four interpreters start
        there = len(job.folders())
        job.add(4)
        assert job.until(lambda: len(job.folders()) >= there + 4), job.log()
        send(last.workers(), signal.SIGCONT)
        assert job.until(lambda: "on 5 ranks" in job.log()), job.log()
        while job.pause():
            pass
        assert not job.everyone()
        assert [agent.process.returncode for agent in job.agents[3:]] == [0] * 5, job.log()
    check_outcome(tmp_path, expected, "4 -> 3 -> 1 -> 5 ranks")


@pytest.mark.full
@pytest.mark.long
@pytest.mark.timeout(LIMIT)
@pytest.mark.parametrize("seed", [0, 1])
def test_whatever_happens_to_ranks_the_run_ends_with_the_same_bits(
    seed: int, tmp_path: Path, expected: TrainedRun
) -> None:
    assert check_disturbed(seed, expected, tmp_path)


# ------------------------------------------------------------------------------------------- the script of the page


@pytest.mark.full
@pytest.mark.timeout(LIMIT)
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)], ids=["killed", "asked to end"]
)
def test_the_script_of_the_page_runs_as_it_stands_and_loses_a_worker(number: signal.Signals, tmp_path: Path) -> None:
    """It runs with more steps, so that there is time for it."""
    code = (ROOT / "zero" / "ELASTIC.md").read_text().partition("```python\n")[2].partition("```")[0]
    code = code.replace("EVERY = 60, 6, 10", f"EVERY = 200, 6, {10 if number == signal.SIGKILL else 1000}")
    (tmp_path / "script.py").write_text(code)
    names: dict[str, Any] = {}
    exec(code.partition("with zero.process_group")[0], names)
    steps, micro_batches, every = names["STEPS"], names["MICRO_BATCHES"], names["EVERY"]
    assert steps == 200
    with elastic_job(tmp_path, [str(tmp_path / "script.py")], tmp_path) as job:
        job.add(3)
        begun = "step-*" if number == signal.SIGKILL else ".lock"
        assert job.until(lambda: list((tmp_path / "saved").glob(begun))), job.log()
        time.sleep(1.0)
        send(job.staying[1].workers(), number)
        while job.pause():
            pass
        assert [agent.process.returncode for agent in job.agents] == [0] * 3, job.log()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        for index in range(micro_batches):
            inputs, targets = names["micro_batch"](step, index)
            nn.functional.mse_loss(model(inputs), targets).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(micro_batches)
        optimizer.step()
        optimizer.zero_grad()
    saved = sorted(int(path.name[5:]) for path in (tmp_path / "saved").glob("step-*"))
    assert saved[-1] == steps
    if number == signal.SIGTERM:
        assert len(saved) == 2, "the step after which all ranks have ended, and the last one"
    else:
        assert saved == list(range(every, steps + 1, every))
    trained = zero.open_checkpoint(tmp_path / "saved" / f"step-{steps:08d}").model_state_dict()
    for name, parameter in model.named_parameters():
        assert torch.equal(bits(parameter), bits(trained[name]))


# ----------------------------------------------------------------------------------------------------- a signal


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
        assert cli.main(cadence.arguments(tmp_path / "a", 1, 2), "train") == 128 + signal.SIGTERM
    assert "stopped: rank 0 got SIGTERM: all ranks have saved step 4 and end" in capsys.readouterr().err
    assert cli.main(cadence.arguments(tmp_path / "a", 1, 2), "train") == 0
    assert "goes on from step 4 on 1 rank" in capsys.readouterr().out
    assert cli.main(cadence.arguments(tmp_path / "b", 1, 2), "train") == 0
    found, undisturbed_run = (json.loads((tmp_path / name / "out" / "run.json").read_text()) for name in "ab")
    assert found["params_sha256"] == undisturbed_run["params_sha256"]
    assert found["losses"] == undisturbed_run["losses"]
