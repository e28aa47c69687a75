"""`python -m tests.net COMMIT`: shows that the working tree behaves as a commit did, bit for bit.

For commits that move or change code and must change no behaviour. Two sides do the same at the same time, each with its
own `zero` and `collectives`: the commit's, and those of the working tree, uncommitted edits included. Nothing is
stored: the reference is made in the same run, on the same machine.

    programs   20 random training programs of `tests.machine`: the SHA-256 of every parameter, optimizer state and
               gradient after every command; and once more undisturbed, with traffic and `describe()`
    settings   12 settings: the same, in a fixed program
    trained    12 runs of `zero train` in real processes: run.json

Both sides run the tests' code of the working tree, so what this package imports must also fit the commit's `zero` and
`collectives`: it uses their public names alone. Ranks with memory in common need the insides of `collectives` where
they are threads; here they are processes.
"""
