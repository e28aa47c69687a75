"""States are read, saved, loaded, reset and averaged as the plain loop's, and bytes are the formulas'."""
