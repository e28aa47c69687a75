"""`python -m tests.net COMMIT`: compare the working tree's behaviour with that of a commit, bit for bit.

This is for commits that move or change code and must change no behaviour. Two sides do the same at the same time, each
with its own `zero` and `collectives`: the commit's, and those of the working tree, uncommitted edits included. Nothing
is stored: the reference is made in the same run, on the same machine.

    programs   of the dials (`tests.dials`): each pair of values of two of them, with a load, and calls at wrong
               moments: the SHA-256 of every parameter, optimizer state and gradient after every command; and once more
               undisturbed, with traffic and `describe()`
    refused    arguments that are refused, and that ranks may not give differently: the texts of errors
    trained    runs of `zero train` in real processes: run.json

Both sides run the tests' code of the working tree. So the imports of this package must also exist in the commit's
`zero` and `collectives`: it uses only their public names, and leaves out commands whose call the commit lacks. If ranks
are threads, sharing memory needs internals of `collectives`; so those ranks are processes here.
"""
