"""`zero.verify`: trains a loop of the user's with and without the library, and compares the bits."""
