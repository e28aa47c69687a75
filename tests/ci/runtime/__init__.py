"""Tests of `zero.runtime` for CI."""
