"""Data: positions in the sample stream become micro-batches."""
