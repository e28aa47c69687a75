"""Stage 3 on processes, and compiled."""
