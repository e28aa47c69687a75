"""Each rank loads whole micro-batches of one order, which is the plain loop's at any number of ranks."""
