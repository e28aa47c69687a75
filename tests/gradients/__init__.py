"""Tests of `zero.gradients`."""
