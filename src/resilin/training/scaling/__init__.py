"""Scaling: the complete gradient of a step in, gain and factors for the optimizer out."""
