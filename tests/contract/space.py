"""What training programs do: habits of loops, for the tests whose programs are those of `support.programs`."""

from __future__ import annotations

from ..support.programs import Round, Step

OFF, ON = Round(sync=False), Round()
INFINITY = float("inf")
CLIPPED = Step(clips=((0.1, 2.0),))
HABITS: dict[str, tuple[Step, ...]] = {
    "clips": (CLIPPED, Step(lr=3e-3), Step()),
    "norms": (Step(clips=((0.3, 1.0), (0.2, 3.0))), Step(clips=((0.3, INFINITY), (INFINITY, 2.0))), Step()),
    "no sync": (Step((OFF, OFF, ON)), Step((OFF, OFF)), Step((ON, OFF)), Step((ON, OFF, ON, OFF), CLIPPED.clips)),
    "fewer": (
        Step((ON, Round(ranks=1))),
        Step((Round(ranks=2), Round(ranks=1))),
        Step((Round(ranks=2), Round(ranks=1, sync=False))),
        Step((Round(ranks=1),) * 2),
        Step(),
    ),
    "freezes": (
        Step(),
        Step(toggle=("frozen", "first.weight")),
        Step(toggle=("last.bias", "frozen")),
        Step(toggle=("first.weight", "last.bias"), clips=CLIPPED.clips),
    ),
    "divisors": (Step(divisor=7.5), Step(divisor=3.0, clips=CLIPPED.clips), Step()),
    "scales": (Step(), Step((ON, OFF), CLIPPED.clips, overflow=(1, 0)), Step(unscale=False), Step()),
    **{
        clear: (Step(clear=clear), Step(clear=clear, step=False), Step(clear=clear, clips=CLIPPED.clips), Step())
        for clear in ("zero_grad", "zeros", "module", "module zeros", "none")
    },
}
