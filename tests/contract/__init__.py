"""Tests of the whole library by what README and the recipes promise."""
