"""Tests of the whole library beside other libraries."""
