"""Micro-batches in, the exact mean gradient of the global batch and its norms out."""
