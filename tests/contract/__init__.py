"""The plain loop's bits over the whole space of settings, random programs, and what never changes."""
