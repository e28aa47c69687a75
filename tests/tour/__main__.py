"""`python -m tests.tour`: take the step of zero/TOUR.md, and print what its two ranks hold.

`python -m tests.tour --fix` renews the numbers of lines in the page, and the blocks that it quotes.
"""

from __future__ import annotations

import sys

import torch

from .page import MOST_LINES, PAGE, blocks, count, renewed

if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:] == ["--fix"]:
        text = renewed(PAGE.read_text())
        PAGE.write_text(text)
        print(f"{PAGE}: {count(text)} lines to read, at most {MOST_LINES}")
    else:
        for name, block in blocks().items():
            if name.startswith(("owners", "stage")):
                print(f"{name}\n{block}")
