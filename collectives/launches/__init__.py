"""What ranks have launched on devices, without an awaited message for each collective.

    ledger     what this rank has launched: a count, a digest, the last tags
    gate       when a collective still awaits the headers of all ranks
    sentinel   a thread that finds out why a rank waits for long
    verdict    the words of what it finds
    board      what the sentinels write and read
    at_exit    calls that may never return

Knows: tags, threads and clocks. Does not know: messages, devices.
"""
