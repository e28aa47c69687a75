"""What is written is read again, bit for bit, at any topology, after any crash, or is an error by name."""
