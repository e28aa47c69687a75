"""Whole scripts in the way of other libraries, with the line that our pages change, beside the library alone."""
