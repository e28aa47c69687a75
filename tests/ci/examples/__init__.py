"""The scripts of zero/examples do what they say, run as a user runs them."""
