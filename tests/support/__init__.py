"""What tests share: the plain loop, models, programs, ranks, faults."""
