"""The page names the lines that it means, quotes the step that is taken, and stays short."""

from __future__ import annotations

import pytest
import torch

from ..support.plain import assert_same_model, plain_step
from .page import LINK, MOST_LINES, PAGE, ROOT, count, links, renewed
from .step import BATCHES, OPTIMIZER, both, build


def test_the_page_has_the_lines_and_the_numbers_of_now() -> None:
    text = PAGE.read_text()
    assert text == renewed(text), "run `python -m tests.tour --fix`, and read the sentences around each change"
    assert len(list(links(text))) == text.count("#L"), "a link that is not read names no line for sure"


def test_the_tour_is_as_short_as_it_says() -> None:
    text = PAGE.read_text()
    assert f"fewer than {MOST_LINES}" in text
    assert 200 < count(text) < MOST_LINES
    assert text.count("\n") <= 195


def test_a_line_that_moved_and_a_name_that_is_gone_are_found() -> None:
    text = PAGE.read_text()
    moved = LINK.sub(lambda link: link[0].replace(f"#L{link['begin']}-", "#L1-"), text)
    assert moved != text == renewed(moved)
    for old, new, error in (
        ("EvenCuts", "OddCuts", "OddCuts is defined 0 times"),
        ("layout.py: EvenCuts", "layout.py: bound", "bound is defined 5 times"),
        ("`match`", "`no match`", "'no match' is in no line"),
        ("(core/layout.py", "(core/buckets.py", "is not layout"),
    ):
        with pytest.raises(LookupError, match=error):
            renewed(text.replace(old, new))


@pytest.mark.parametrize("stage", [2, 3])
def test_the_step_has_the_bits_of_the_plain_loop(stage: int) -> None:
    plain, arguments = build(), dict(OPTIMIZER)
    optimizer = arguments.pop("optimizer_class")(plain.parameters(), **arguments)
    batches = [torch.tensor(batch) for batch in BATCHES]
    plain_step(plain, optimizer, lambda model, x: model(x).sum(), batches, 2, 3.0)
    for rank in both(stage):
        assert rank.model is not None
        assert_same_model(rank.model, plain)


def test_the_map_leads_to_the_tour() -> None:
    assert "(TOUR.md)" in (ROOT / "zero/ARCHITECTURE.md").read_text()
