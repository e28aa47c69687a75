"""Whole scripts to copy and to run: python -m zero.examples.NAME."""
