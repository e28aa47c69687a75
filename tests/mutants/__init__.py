"""Random mutants of the library: how many of them the tests kill."""
