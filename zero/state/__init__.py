"""The readable state of an optimizer: its states as a plain dict, and its description."""
