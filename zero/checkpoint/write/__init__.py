"""Writes checkpoints."""
