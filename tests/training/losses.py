"""Losses that couple the samples of a batch, so that its split changes them."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def info_nce(model, x, y):
    """Each sample against all others of the batch."""
    del y
    a, b = F.normalize(model(x), dim=1), F.normalize(model(x + 0.1), dim=1)
    return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(x)))


def weighted(model, x, y):
    """A mean over the class weights of the batch, and not over its samples."""
    weight = torch.tensor([1.0, 5.0, 20.0], dtype=torch.float64)
    return F.cross_entropy(model(x), y, weight=weight)
