"""Random training programs: a description, the plain loop that follows it, and ranks that follow it."""
