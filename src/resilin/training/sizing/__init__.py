"""Sizing: the next batch size, and the largest micro-batch that fits."""
