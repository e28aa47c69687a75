"""Which builds of torch `python -m tests.versions` takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from .versions import accelerators, numbers, others


def report(*names: str) -> dict[str, list[dict[str, dict[str, str]]]]:
    return {"install": [{"metadata": {"name": name}} for name in names]}


def test_a_build_that_brings_an_accelerator_is_told_from_one_for_the_cpu() -> None:
    assert accelerators(report("torch", "sympy", "networkx", "filelock")) == []
    assert accelerators(report("torch", "nvidia-cublas", "cuda-toolkit", "triton")) == [
        "cuda-toolkit",
        "nvidia-cublas",
        "triton",
    ]


@pytest.mark.parametrize(("text", "expected"), [("2.11.0", (2, 11, 0)), ("2.9.1", (2, 9, 1)), ("3.0", (3, 0))])
def test_versions_are_compared_by_their_numbers(text: str, expected: tuple[int, ...]) -> None:
    assert numbers(text) == expected


def test_every_constraint_but_torchs_is_kept(tmp_path: Path) -> None:
    page = tmp_path / "constraints.txt"
    page.write_text("numpy==2.4.6\ntorch==2.13.0\ntyper==0.29.2\n")
    assert list(others(page)) == ["numpy==2.4.6", "typer==0.29.2"]
