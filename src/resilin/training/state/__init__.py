"""State: what survives a restart, and how it is restored."""
