"""Messages between ranks, over what a backend can send.

    control_plane     how short messages reach all ranks
    exposed_buffers   memory that a peer reads in place
    messenger         tagged messages from rank to rank, and what is under way between two ranks

Knows: tags and backends. Does not know: algorithms, devices.
"""
