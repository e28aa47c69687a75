"""Private names of torch that a release may lack."""
