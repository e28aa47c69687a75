"""`zero.verify` finds the first wrong bit on real ranks, names the rank that fails, and leaves no file behind."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import verified
from tests.commands.conftest import ROOT
from tests.support.narrowed import PRECISIONS
from zero import verify
from zero.commands import cli
from zero.commands.verify.bit_diff import Run

LIMIT = 300  # seconds for real processes; they take about ten on an idle machine
pytestmark = [pytest.mark.usefixtures("temporary"), pytest.mark.timeout(LIMIT)]


def test_on_real_ranks_the_right_runs_are_right_and_the_wrong_ones_wrong_where_they_are() -> None:
    found = verify(
        verified.build_odd,
        verified.batches,
        loss_fn=verified.wrong_on_rank_one_of_two,
        world_sizes=(1, 2),
        micro_batches=verified.MICRO_BATCHES,
        max_norm=0.5,
        bucket_cap_mb=0.001,
        lr=1e-2,
    )
    numel = sum(parameter.numel() for parameter in verified.build_odd().parameters())
    right = [Run(stage, 1, verified.STEPS, numel, (), None) for stage in (None, *range(4))]
    assert (found.plain, *found.runs[4:]) == tuple(right)
    assert found.runs[:4] == tuple(Run(stage, 2, 1, numel, (0, 1), found.runs[0].difference) for stage in range(4))
    difference = found.runs[0].difference
    assert difference is not None
    assert (difference.parameter, difference.numel) == ("turned", numel)
    assert not found.ok
    assert str(found).endswith("4 of 8 runs differ from the plain loop")


def test_what_differs_between_processes_is_not_blamed_on_a_stage() -> None:
    found = verify(verified.Squares, verified.pairs, loss_fn=verified.other_in_each_process, world_sizes=(2,), lr=0.1)
    assert found.plain.step == 1
    assert found.plain.difference is not None
    assert found.runs == ()


def test_the_error_of_a_rank_is_one_line_and_nothing_hangs(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tests.commands.verified:failing_arguments"], "verify") == 1
    captured = capfd.readouterr()
    line = (
        r"error: rank 1: stage 1 on 2 ranks, step 1, batches\[1\]: ArithmeticError: a rank's own trouble "
        rf"\(at {re.escape(verified.__file__)}:\d+, in fails_on_rank_one_of_two\)\n"
    )
    assert re.fullmatch(line, captured.err)
    assert "the plain loop, again: same bits, 6 steps" in captured.out


def test_the_example_in_the_contract_runs_as_printed_also_as_a_script(tmp_path: Path) -> None:
    section = (ROOT / "zero" / "CONTRACT.md").read_text().partition("## Check it on your own model")[2]
    code, printed = re.findall(r"```(?:python)?\n(.*?)```", section, re.DOTALL)[:2]
    (tmp_path / "my_model.py").write_text(code)
    call = "os.write(1, b'imported\\n')\n"  # in each of four processes, in one piece
    given = "**{**arguments(), 'world_sizes': [1]}, stages=(2,), quiet=True"
    call += f"if __name__ == '__main__':\n    zero.verify({given})\n"
    (tmp_path / "a script.py").write_text(f"import os\nimport zero\n{code}{call}")
    for words, shown in ((("-m", "zero.verify", "my_model:arguments"), printed), (("a script.py",), 4 * "imported\n")):
        ended = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT, check=False
        )
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, shown, "")


def test_groups_with_classes_of_their_own_on_ranks_of_a_mesh_have_the_bits_of_plain_optimizers() -> None:
    given = {"param_groups": verified.muon_and_the_rest, "mesh": (2, 2), "world_sizes": (4,)}
    more = {"batches": verified.pairs(8), "micro_batches": 4, "max_norm": 0.5, "mixed_precision": PRECISIONS["bf16"]}
    found = verified.alone(**given, **more, stages=(0, 3))
    assert [(run.stage, run.world_size, run.ok) for run in found.runs] == [(0, 4, True), (3, 4, True)], str(found)
