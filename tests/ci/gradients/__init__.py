"""Python calls of a backward."""
