"""Reads checkpoints, and loads them into optimizers."""
