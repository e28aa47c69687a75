"""Messages between ranks, over what a backend can send.

    control_plane     how short messages reach all ranks
    exposed_buffers   memory that a peer reads in place
    messenger         tagged messages from rank to rank
    peer_links        what is under way between two ranks, and the ports of a backend

Knows: tags and backends. Does not know: algorithms, devices.
"""
