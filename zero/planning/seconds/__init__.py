"""How long a step takes: its parts on given hardware, and their order."""
