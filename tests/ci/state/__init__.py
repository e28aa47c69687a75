"""Live states, and dicts of older releases."""
