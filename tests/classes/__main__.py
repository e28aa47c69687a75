"""`python -m tests.classes [LIBRARY | LIBRARY.CLASS ...]`: a line for each class, by default of all five libraries.

Exit code 1: bits of a class differ, or it is built and then fails.
"""

from __future__ import annotations

import sys
import time
from collections import Counter

import torch

from ..support.pool import GlooPool, stop_forkserver
from ..support.processor import spare_matrix_unit
from .uses import LIBRARIES, names_of
from .verdicts import verdict_on


def main(chosen: list[str]) -> int:
    spare_matrix_unit()
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")
    pool, kinds, wrong = GlooPool(), Counter[str](), 0
    names = [name for each in chosen or LIBRARIES for name in (names_of(each) if each in LIBRARIES else [each])]
    try:
        for name in names:
            begin = time.monotonic()
            found = verdict_on(pool, name)
            kinds[found.kind] += 1
            wrong += bool(found.differs) or found.kind == "fails"
            bits = "" if found.kind == "refused" else f", {found.differs or 'same bits'}"
            bits += f", but its states cannot be saved ({found.unsaved})" if found.unsaved else ""
            print(
                f"{name}: {found.kind}{bits} [{found.model}] {time.monotonic() - begin:.0f} s. {found.why}", flush=True
            )
    finally:
        pool.stop()
        stop_forkserver()
    print(f"{len(names)} classes: " + ", ".join(f"{kind}: {count}" for kind, count in kinds.items()))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
