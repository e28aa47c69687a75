"""Tests of `zero.step`."""
