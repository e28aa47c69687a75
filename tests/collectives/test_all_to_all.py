"""Collectives of the process group itself begin when all ranks are in the same, and end the group if they fail."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from collectives import ALGORITHMS, Kind, MismatchError, Tag
from collectives.backends import gloo as backend
from collectives.backends.gloo import DEFAULT_TIMEOUT, connect, timeout_of

from ..support.carried import reduction
from ..support.pool import GlooPool
from ..support.rows import rows
from ..support.sockets import works

OTHERS = {
    "exchange": "consolidate [exchange, round 0, index 0]",
    "gather": "parameters [all_gather, round 3, index 4]",
    "cut": "bucket 0 [reduce_scatter, round 3, index 4]",
    "dtype": "bucket 0 [reduce_scatter, round 3, index 4]",
}


def different(group: dist.ProcessGroup, rank: int, algorithm: str, other: str) -> tuple[str, str]:
    """Return the error of a rank where rank 1 is in another collective. The process group remains usable."""
    transport = connect(group).fork()
    collective, bounds, second = ALGORITHMS[algorithm](transport), [0, 2, 4, 6], rank == 1
    whole, tag = torch.ones(6), reduction("bucket 0", 3, 4)

    def enter() -> None:
        if second and other == "exchange":
            transport.exchange(b"", Tag(Kind.EXCHANGE, "consolidate"))
        elif second and other == "gather":
            collective.all_gather(whole, bounds, tag=Tag(Kind.ALL_GATHER, "parameters", 3, 4))
        elif second and other == "cut":
            collective.reduce_scatter(whole, [0, 1, 4, 6], whole[1:4], start=None, tag=tag)
        else:
            source = whole.double() if second else whole
            collective.reduce_scatter(source, bounds, whole[2 * rank : 2 * rank + 2], start=None, tag=tag)

    with pytest.raises(MismatchError) as caught:
        enter()
    return str(caught.value), works(ALGORITHMS[algorithm](connect(group).fork()))


@pytest.mark.parametrize("algorithm", rows(["native"], ["all_to_all"]))
def test_ranks_in_different_collectives_learn_of_both_before_a_byte_moves(gloo: GlooPool, algorithm: str) -> None:
    for other, said in OTHERS.items():
        for message, name in gloo.run(different, algorithm, other, ranks=range(3)):
            assert name == algorithm
            assert "bucket 0 [reduce_scatter, round 3, index 4]" in message
            assert f"rank 1 is in {said}" in message


def test_where_torch_hides_a_time_limit_it_is_torchs_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_backends", lambda group: {"cuda": "nccl", "cpu": "gloo"})
    assert timeout_of(mock.Mock(spec=[])) == DEFAULT_TIMEOUT
