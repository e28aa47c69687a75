"""Each algorithm has the sums of the plain loop, in time, in order and in bounded memory, or one error."""
