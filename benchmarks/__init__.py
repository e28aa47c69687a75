"""Benchmarks of the collectives and of training steps, beside gloo, the memory bus, a wire, and other libraries.

README.md says how to read them. Not part of the installed packages: run them from a clone.
"""
