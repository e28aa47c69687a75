"""Tests of `zero.runtime`."""
