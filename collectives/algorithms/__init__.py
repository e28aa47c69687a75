"""Reduce-scatter and all-gather, one module each."""
