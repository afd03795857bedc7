"""Data whose gradient is noisy: linear classification with wrong labels."""

import torch
from torch.utils.data import TensorDataset


def noisy_data(num):
    """So many points; a fifth of the labels is drawn at random."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num, 10, generator=generator)
    y = (x @ torch.randn(10, 4, generator=generator)).argmax(1)
    wrong = torch.rand(num, generator=generator) < 0.2
    y[wrong] = torch.randint(4, (int(wrong.sum()),), generator=generator)
    return TensorDataset(x, y)
