"""`python -m zero.verify MODULE:FUNCTION`: the command `zero verify`. An import of this module gives the function
`zero.verify`, so that it hides nothing."""

from __future__ import annotations

import sys

from .commands.verify.verification import verify

if __name__ == "__main__":
    from .commands.cli import main

    sys.exit(main(command="verify"))
sys.modules[__name__] = verify  # type: ignore[assignment]
