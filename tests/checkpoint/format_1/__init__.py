"""Checkpoints of format 1 that were written once, by a release of 2026, and their model and classes."""
