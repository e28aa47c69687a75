"""The bug zoo: published bugs of such libraries as small patches of this one, each of which some test must notice."""
