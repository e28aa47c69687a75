"""Tests of `zero.planning` over every setting."""
