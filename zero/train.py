"""`python -m zero.train`, also under torchrun: the command `zero train`."""

from __future__ import annotations

import sys

from .commands.cli import main

if __name__ == "__main__":
    sys.exit(main(command="train"))
