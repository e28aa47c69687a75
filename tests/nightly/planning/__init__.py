"""Every planned setting."""
