"""The PyTorch loop made elastic: what holds a tensor, around the pure core."""
