"""What the collectives cost, beside gloo's own, beside the memory bus and beside the wire. README.md says how to read
it. Not part of the installed packages: run from a clone."""
