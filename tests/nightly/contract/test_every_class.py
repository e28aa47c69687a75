"""Each class of six libraries trains the plain loop's bits, or is refused with the reason that is known."""

from __future__ import annotations

import pytest

from ...classes.uses import LIBRARIES, names_of, reason_of
from ...classes.verdicts import verdict_on
from ...support.pool import GlooPool

LATER = {"pytorch_optimizer.AdaShift", "pytorch_optimizer.Conda", "pytorch_optimizer.ScalableShampoo"}


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("library", LIBRARIES)
def test_every_class_of_a_library_trains_the_bits_or_is_refused_with_its_reason(gloo: GlooPool, library: str) -> None:
    pytest.importorskip(LIBRARIES[library])
    for name in names_of(library):
        found, reason = verdict_on(gloo, name), reason_of(name)
        assert found.kind != "fails", found
        assert not found.differs, found
        assert (found.kind == "refused") == (reason is not None), found
        assert (reason or "") in found.why, found
        assert bool(found.unsaved) == (name in LATER), found
