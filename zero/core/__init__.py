"""Geometry and formulas: no ranks, no autograd."""
