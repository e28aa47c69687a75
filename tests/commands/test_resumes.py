"""`zero train` loses ranks by SIGKILL and goes on at other numbers of ranks and stages: `tests.resumes` in small."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from zero.commands import cli
from zero.commands.train import report

from ..resumes import LIMIT, Cadence, TrainedRun, check_disturbed, kill, outcome, started, undisturbed, verified


def trained_alone(cadence: Cadence, folder: Path, stage: int, patch: pytest.MonkeyPatch) -> TrainedRun:
    """Train on one rank in this process, without pictures, which take longer."""
    patch.setattr(report, "can_draw", lambda: False)
    assert cli.main(cadence.arguments(folder, 1, stage), "train") == 0
    return outcome(folder)


@pytest.mark.full
@pytest.mark.timeout(LIMIT)
def test_a_run_whose_rank_is_killed_goes_on_alone_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, folder = tmp_path / "text", tmp_path / "disturbed"
    text.write_text("".join(f"{number} bottles of beer on the wall\n" for number in range(300)))
    cadence = Cadence(steps=12, micro_batches=4, every=3, more=("--sequence=24", f"--data={text}"))
    expected = trained_alone(cadence, tmp_path / "undisturbed", 0, monkeypatch)
    with started(cadence, folder, ranks=2, stage=3) as command:
        while not verified(folder) and command.pause():
            pass
        kill(command.ranks()[1])
        assert command.wait() == 1, command.output()
        assert "error: rank 1: the process was ended by SIGKILL" in command.output()
    assert verified(folder).items() <= expected.contents.items()
    assert trained_alone(cadence, folder, 1, monkeypatch) == expected
    assert re.search(r"goes on from step \d+ on 1 rank\n", capsys.readouterr().out)


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    return undisturbed(Cadence(), tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.full
@pytest.mark.long
@pytest.mark.timeout(6 * LIMIT)
@pytest.mark.parametrize("seed", range(5))
def test_runs_that_are_killed_at_random_moments_end_with_the_same_bits(
    seed: int, tmp_path: Path, long_run: TrainedRun
) -> None:
    assert check_disturbed(seed, Cadence(), long_run, tmp_path)
