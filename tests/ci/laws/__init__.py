"""Laws on processes."""
