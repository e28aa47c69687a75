"""Tests of `zero.parameters`."""
