"""Deaths, full disks, processes and memory of saves and loads; plain torch trains on."""
