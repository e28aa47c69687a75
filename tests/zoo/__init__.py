"""Published bugs, put into live functions one at a time, each of which a test must catch."""
