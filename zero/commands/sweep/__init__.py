"""`zero sweep`: time and memory of a step over stages and bucket sizes."""
