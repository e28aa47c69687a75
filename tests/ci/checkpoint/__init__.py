"""Deaths, processes and memory of saves and loads; plain torch trains on."""
