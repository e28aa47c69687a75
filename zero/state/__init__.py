"""What can be read of an optimizer: its states as a plain dict, and its description."""
