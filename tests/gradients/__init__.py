"""`p.grad` is right or raises; backwards, ranks and rounds are added up in the contract's order."""
