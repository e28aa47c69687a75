"""Ranks that die in the middle of a collective."""
