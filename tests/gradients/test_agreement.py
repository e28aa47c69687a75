"""Before a call changes anything, all ranks agree to it: in one round, which carries every rank's record."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Transport, on_threads
from collectives.links.messenger import Messenger
from zero import ZeroOptimizer
from zero.gradients.agreement import LONGEST_REPORT

from ..support.parts import parts_of
from ..support.plain import assert_same_bits, assert_same_model
from ..support.small import TwoVectors, plain_two, with_sgd

WORLD = 3


class Rounds:
    """Counts the full meshes of control messages that rank 0 takes part in, by what they are for."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen = [Counter[str]() for _ in range(WORLD)]
        send = Messenger.send_control

        def sent(messenger: Messenger, data: bytes, to: int, tag: Any) -> Any:
            if messenger.rank == 0:
                self.seen[to][tag.label] += 1
            return send(messenger, data, to, tag)

        patch.setattr(Messenger, "send_control", sent)

    def taken(self, rank: int) -> Counter[str]:
        """Return those since the last call, on rank 0."""
        if rank:
            return Counter()
        (_, first, *others), self.seen = self.seen, [Counter[str]() for _ in range(WORLD)]
        assert all(other == first for other in others), "as many to each rank"
        return first


CLIP, STEP, UNSCALE = "clip_grad_norm_()", "step()", "GradScaler.unscale_()"
NORM, FINITE, USED, JOIN = "gradient norm", "gradients that are not finite", "which parameters were used", "join()"
EXPECTED = {
    "step": [STEP],
    "clip": [CLIP, NORM, STEP],
    "scaler": [UNSCALE, FINITE, STEP],
    "scaler and clip": [UNSCALE, FINITE, CLIP, STEP],  # the gradients are means already: the norm travels with the clip
}
UNSCALED_BY_TORCH = {"scaler": EXPECTED["step"], "scaler and clip": EXPECTED["clip"]}
CALLS_INSIDE_JOIN = {"step": 1, "clip": 2, "scaler": 2, "scaler and clip": 3}


def one_step(model: nn.Module, optimizer: ZeroOptimizer, scaler: Any, what: str, rounds: Rounds) -> list[Counter[str]]:
    """Take a step; return the rounds of the backward and of what follows, on rank 0."""
    rounds.taken(optimizer.rank)
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    optimizer.exchange(b"")  # no rank is behind
    found = [rounds.taken(optimizer.rank)]
    if "clip" in what:
        scaler.unscale_(optimizer)
        optimizer.clip_grad_norm_(0.1)
    scaler.step(optimizer)
    found.append(rounds.taken(optimizer.rank))
    scaler.update()
    optimizer.zero_grad()
    return found


@pytest.mark.law("agreement before a change")
@pytest.mark.parametrize(
    ("stage", "what", "joined"),
    [
        *((3, "step", False), (3, "clip", False), (1, "scaler", False), (0, "step", False)),
        *((2, "scaler and clip", False), (0, "scaler", True), (2, "step", True)),
    ],
)
def test_the_control_rounds_of_a_step(stage: int, what: str, joined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One round without a clip, three with one, four with a scaler and a clip. Inside `join` each call of the user, a
    clip, an unscaling or a step, is announced in one round more.

    At stage 0 `p.grad` must be None after a backward if no rank used the parameter, so each backward has a round, too.
    There torch's own scaler unscales whole gradients on every rank, without a message, except inside `join`.
    """
    rounds = Rounds(monkeypatch)
    shown = stage == 0 and not joined
    expected = Counter(UNSCALED_BY_TORCH.get(what, EXPECTED[what]) if shown else EXPECTED[what])
    if joined:
        expected[JOIN] = CALLS_INSIDE_JOIN[what]

    def program(transport: Transport) -> list[list[Counter[str]]]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizer = with_sgd(model, transport, stage=stage, collective="pairwise")
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled="scaler" in what)
        with optimizer.join() if joined else nullcontext():
            return [one_step(model, optimizer, scaler, what, rounds) for _ in range(2)]

    for backward, rest in on_threads(WORLD, program)[0]:
        assert rest == expected
        backward.pop("exchange()")
        backward.pop(JOIN, None)
        assert backward == Counter([USED] if shown else [])


@pytest.mark.parametrize(("stage", "behind"), list(enumerate([0, 1, 0, 1])))
def test_a_record_is_that_of_its_rank_after_it_has_caught_up(stage: int, behind: int) -> None:
    """What `no_sync` left is reduced in the round of the other rank, in which the rank behind takes part late. Its
    record no longer says that something is pending: no further round follows."""

    def program(transport: Transport) -> tuple[nn.Module, int]:
        model = TwoVectors()
        optimizer = with_sgd(model, transport, stage=stage, module=model, divisor=2.0)
        with optimizer.no_sync() if transport.rank == behind else nullcontext():
            model(1.0 + transport.rank, transport.rank == behind).backward()
        optimizer.clip_grad_norm_(0.5)
        rounds = parts_of(optimizer).reducer.schedule.number
        optimizer.step()
        optimizer.close()
        return model, rounds

    expected = plain_two([(1.0, behind == 0), (2.0, behind == 1)], 2.0, clip=0.5)
    for model, rounds in on_threads(2, program):
        assert_same_model(model, expected)
        assert rounds == 1


def test_a_gradient_that_one_rank_clears_after_a_clip_is_used_by_all() -> None:
    def program(transport: Transport) -> Tensor:
        model = TwoVectors()
        optimizer = with_sgd(model, transport, bucket_cap_mb=1e-6)
        model(1.0 + transport.rank).backward()
        optimizer.clip_grad_norm_(0.5)
        if transport.rank:
            model.a.grad = None
        optimizer.step()
        optimizer.check_replicas()
        return model.b

    for b in on_threads(2, program):
        assert_same_bits(b, plain_two([(1.0, True), (2.0, True)], 2, clip=0.5).b)


@pytest.mark.law("agreement before a change")
def test_reports_come_also_where_the_ranks_do_not_agree() -> None:
    def program(transport: Transport) -> list[dict[str, str]]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        groups: Any = [{"params": [p]} for p in model.parameters()]
        optimizer = with_sgd(groups, transport, module=model)
        agreement = parts_of(optimizer).reducer.agreement
        agreement.report("rank", str(transport.rank))
        agreement.report("stop", "x" * 2 * LONGEST_REPORT if transport.rank else None)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.param_groups[2]["lr"] = 0.1 + transport.rank
        with pytest.raises(ValueError, match="option 'lr' of the param groups differs between rank 0 and rank 1"):
            optimizer.step()
        optimizer.param_groups[2]["lr"] = 0.2
        optimizer.step()  # no state was lost
        found = agreement.reports
        agreement.report("stop", None)
        optimizer.zero_grad()
        optimizer.step()
        assert agreement.reports == [{"rank": "0"}, {"rank": "1"}]
        return found

    assert on_threads(2, program) == [[{"rank": "0"}, {"rank": "1", "stop": "x" * LONGEST_REPORT}]] * 2
