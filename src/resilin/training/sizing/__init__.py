"""Sizing: which batch size comes next, and what fits."""
