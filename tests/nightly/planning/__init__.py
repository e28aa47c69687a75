"""Tests of `zero.planning` over every setting, and against transformers."""
