"""Bridge: what the framework integrations share."""
