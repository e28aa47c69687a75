"""Checkpoints whose bytes do not depend on the ranks that wrote them."""
