"""Tests of `zero.step` for CI."""
