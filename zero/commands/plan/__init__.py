"""`zero plan`."""
