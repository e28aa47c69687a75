"""`zero train`, `zero verify`, `zero plan` and `zero checkpoint` do what their help says."""
