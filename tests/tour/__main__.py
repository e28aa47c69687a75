"""`python -m tests.tour`: take the step of zero/TOUR.md, and print the blocks that the page quotes."""

from .page import blocks

print("\n".join(blocks()))
