"""`zero.verify`: trains a model of the user with and without the library, and compares the bits."""
