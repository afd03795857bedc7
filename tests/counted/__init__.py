"""A device that counts what the host reads from it, and a process group for its tensors."""
