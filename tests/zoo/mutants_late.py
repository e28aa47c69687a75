"""Mutants of accesses to memory between the launch of a collective and its wait."""

from __future__ import annotations

from .mutant import Edit, Mutant

LATE = "collectives/test_late.py::test_training_has_the_plain_loops_bits_when_every_transfer_finishes_late"

MUTANTS = (
    Mutant(
        "a-collective-under-way-holds-no-memory",
        ("L5",),
        "Scratch memory of a collective of the process group is used again while the group still reads and writes it.",
        (
            Edit(
                "collectives.backends.gloo._Collective.__init__",
                "        self._held: tuple[Tensor, ...] = held\n",
                "        self._held: tuple[Tensor, ...] = held[:0]\n",
            ),
        ),
        (f"{LATE}[2-all_to_all]",),
    ),
)
