"""`python -m zero.verify MODULE:FUNCTION`. As a module this is the function `zero.verify`, so that importing it hides
nothing."""

from __future__ import annotations

import sys

from .commands.verify.command import main
from .commands.verify.verification import verify

if __name__ == "__main__":
    sys.exit(main())
sys.modules[__name__] = verify  # type: ignore[assignment]
