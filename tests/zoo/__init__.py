"""The bug zoo: bugs that such libraries had, as small patches of this one, each of which a test must catch."""
