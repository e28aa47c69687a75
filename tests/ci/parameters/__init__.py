"""Stage 3 on processes, in forks, and compiled."""
