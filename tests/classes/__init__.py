"""`python -m tests.classes`: how optimizer classes of other libraries are sharded, and whether with the plain bits."""
