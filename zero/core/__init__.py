"""Geometry and formulas. Nothing here communicates or uses autograd."""
