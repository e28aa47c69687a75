"""Random training programs: a description, the plain loop and the ranks that execute it."""
