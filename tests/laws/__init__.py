"""Laws: what holds for every dial and every combination of dials, asked once."""
