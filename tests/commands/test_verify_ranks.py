"""`zero.verify` on processes of its own: right programs, wrong ones, failures on some rank, and CONTRACT.md's
example."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zero import MixedPrecision, verify
from zero.commands import cli
from zero.commands.verify.bit_diff import Difference, Run, ulps_between

from ..support.models import odd_loss
from ..support.plain import bits, plain_step
from . import verified
from .test_verify import plain_environment  # noqa: F401  a fixture

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
LIMIT = 300  # seconds for real processes; they take about ten on an idle machine


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Return the folder of temporary files, which must be empty in the end."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield folder
    assert not list(folder.iterdir()), "left behind"


def first_element_that_differs() -> tuple[int, str, tuple[int, ...], float, float, int]:
    """Run two plain loops, one of which does what `wrong_on_rank_one_of_two` does.

    Return the first difference: step, parameter, index, both values, and how many elements differ.
    """
    models = verified.build_odd(), verified.build_odd()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]

    def wrong(model: nn.Module, batch: tuple[Tensor, Any]) -> Tensor:
        tokens, (extra, odd) = batch
        loss = odd_loss(model, (tokens, extra))
        return verified.a_little_more(loss) if odd else loss

    batches = [(tokens, (extra, j % 2 == 1)) for j, (tokens, extra) in enumerate(verified.batches())]
    for step in range(verified.STEPS):
        mine = batches[step * verified.MICRO_BATCHES :][: verified.MICRO_BATCHES]
        right = [(tokens, extra) for tokens, (extra, _) in mine]
        plain_step(models[0], optimizers[0], odd_loss, right, verified.MICRO_BATCHES, max_norm=0.5)
        plain_step(models[1], optimizers[1], wrong, mine, verified.MICRO_BATCHES, max_norm=0.5)
        for optimizer in optimizers:
            optimizer.zero_grad()
        places = [
            (name, index)
            for (name, a), (_, b) in zip(models[0].named_parameters(), models[1].named_parameters(), strict=True)
            for index in itertools.product(*map(range, a.shape))
            if not torch.equal(bits(a[index]), bits(b[index]))
        ]
        if places:
            name, index = places[0]
            values = [dict(model.named_parameters())[name][index].item() for model in models]
            return step + 1, name, index, values[0], values[1], len(places)
    raise AssertionError("the wrong loop is not wrong")


@pytest.mark.timeout(LIMIT)
@pytest.mark.usefixtures("temporary")
def test_on_real_ranks_the_right_runs_are_right_and_the_wrong_ones_wrong_where_they_are() -> None:
    """The model has tied, frozen, unused, scalar, empty and strided parameters.

    In the wrong run one of two ranks has another loss.
    """
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
    assert found.plain == Run(None, 1, verified.STEPS, numel, (), None)
    assert [(run.world_size, run.stage) for run in found.runs] == [(w, stage) for w in (2, 1) for stage in range(4)]
    step, name, index, plain, other, count = first_element_that_differs()
    for run in found.runs:
        if run.world_size != 2:
            assert run == Run(run.stage, run.world_size, verified.STEPS, numel, (), None)
            continue
        assert run.difference is not None
        assert (run.step, run.ranks, run.ok) == (step, (0, 1), False)
        ulps = ulps_between(torch.tensor(plain), torch.tensor(other))
        assert run.difference == Difference(name, index, "float32", plain, other, ulps, count, numel)
    assert not found.ok
    assert str(found).endswith("4 of 8 runs differ from the plain loop")


@pytest.mark.timeout(LIMIT)
@pytest.mark.usefixtures("temporary")
def test_what_differs_between_processes_is_not_blamed_on_a_stage() -> None:
    found = verify(verified.Squares, verified.pairs, loss_fn=verified.other_in_each_process, world_sizes=(2,), lr=0.1)
    assert found.plain.step == 1
    assert found.plain.difference is not None
    assert found.runs == ()


@pytest.mark.timeout(LIMIT)
@pytest.mark.usefixtures("temporary")
def test_the_error_of_a_rank_is_one_line_and_nothing_hangs(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tests.commands.verified:failing_arguments"], "verify") == 1
    captured = capfd.readouterr()
    line = (
        r"error: rank 1: stage 1 on 2 ranks, step 1, batches\[1\]: ArithmeticError: a rank's own trouble "
        rf"\(at {re.escape(verified.__file__)}:\d+, in fails_on_rank_one_of_two\)\n"
    )
    assert re.fullmatch(line, captured.err)
    assert "the plain loop, again: same bits, 6 steps" in captured.out


@pytest.mark.timeout(LIMIT)
def test_the_example_in_the_contract_runs_as_printed(temporary: Path, tmp_path: Path) -> None:
    section = (ROOT / "zero" / "CONTRACT.md").read_text().partition("## Check it on your own model")[2]
    code, printed = re.findall(r"```(?:python)?\n(.*?)```", section, re.DOTALL)[:2]
    (tmp_path / "my_model.py").write_text(code)
    command = [sys.executable, "-m", "zero.verify", "my_model:arguments"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, printed, "")


SCRIPT = """
import torch
from torch import nn
from zero import verify

print("a line of the script")

def build_model():
    return nn.Linear(2, 1)

def loss_fn(model, batch):
    return model(batch).sum()

if __name__ == "__main__":
    print("once")
    verify(build_model, [torch.ones(1, 2)] * 2, loss_fn=loss_fn, stages=(2,), world_sizes=(2,), quiet=True)
    print("in the end")
"""


@pytest.mark.timeout(LIMIT)
def test_functions_of_a_script_are_imported_by_its_processes(temporary: Path, tmp_path: Path) -> None:
    (tmp_path / "a script.py").write_text(SCRIPT)
    command = [sys.executable, "a script.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert ended.stderr == ""
    lines = ended.stdout.splitlines()
    assert lines.count("a line of the script") == 5, "of the script itself, two plain loops and two ranks"
    assert [line for line in lines if line != "a line of the script"] == ["once", "in the end"]


@pytest.mark.timeout(LIMIT)
@pytest.mark.parametrize(
    "precision",
    [pytest.param(None, id="fp32"), pytest.param(MixedPrecision(torch.bfloat16), id="bf16", marks=pytest.mark.long)],
)
def test_groups_with_classes_of_their_own_have_the_bits_of_plain_optimizers(
    temporary: Path, precision: MixedPrecision | None
) -> None:
    found = verify(
        verified.Layers,
        verified.rows,
        torch.optim.AdamW,
        param_groups=verified.muon_and_the_rest,
        world_sizes=(1, 2),
        stages=(0, 3),
        max_norm=0.5,
        mixed_precision=precision,
        lr=0.01,
        quiet=True,
    )
    assert found.ok, str(found)
    assert [(run.stage, run.world_size) for run in found.runs] == [(0, 2), (3, 2), (0, 1), (3, 1)]
