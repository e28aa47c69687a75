"""Tests of `zero.core`."""
