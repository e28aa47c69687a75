"""Further rows of mixed precision."""
