"""`python -m tests.net COMMIT`: compare the working tree's behaviour with that of a commit, bit for bit.

This is for commits that move or change code and must change no behaviour. Two sides do the same at the same time, each
with its own `zero` and `collectives`: the commit's, and those of the working tree, uncommitted edits included. Nothing
is stored: the reference is made in the same run, on the same machine.

    programs   random training programs of `tests.support.machine`: the SHA-256 of every parameter, optimizer
               state and gradient after every command; and once more undisturbed, with traffic and `describe()`
    settings   the same, in a fixed program in many settings
    trained    runs of `zero train` in real processes: run.json

Both sides run the tests' code of the working tree. So the imports of this package must also exist in the commit's
`zero` and `collectives`: it uses only their public names. If ranks are threads, sharing memory needs internals of
`collectives`; so those ranks are processes here.
"""
