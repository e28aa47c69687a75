"""What users do on a GPU; on the CPU the same code runs."""
