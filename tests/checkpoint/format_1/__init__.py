"""Checkpoints of format 1 that were written once, and the program that wrote them."""
