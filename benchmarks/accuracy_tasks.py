"""Tasks of `accuracy.py`: data, models, and the tuned reference run of each."""

from __future__ import annotations

import functools
import random
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sklearn.datasets import load_digits, make_classification
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.nn import functional

CONTEXT = 64
"""Bytes in a window of the byte model."""


class Rows:
    """Tensors as a dataset that fetches a whole batch at a time."""

    def __init__(self, *columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(column[index] for column in self.columns)

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        chosen = torch.tensor(indices)
        return tuple(column[chosen] for column in self.columns)

    @staticmethod
    def collate(batch: Any) -> Any:
        """A batch that was fetched as a whole is collated already."""
        return batch


class Split(NamedTuple):
    train: Rows
    test: Rows


def _split(inputs: Any, labels: Any, num_train: int, seed: int, *, standardise: bool) -> Split:
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed)).numpy()
    train, test = order[:num_train], order[num_train:]
    if standardise:
        inputs = StandardScaler().fit(inputs[train]).transform(inputs)

    def rows(chosen: Any) -> Rows:
        x = torch.tensor(inputs[chosen], dtype=torch.float32)
        return Rows(x, torch.tensor(labels[chosen]))

    return Split(rows(train), rows(test))


def digits(seed: int, *, standardise: bool = False) -> Split:
    inputs, labels = load_digits(return_X_y=True)
    # Pixels are 0..16; the test set is the other 797.
    return _split(inputs / 16, labels, 1000, seed, standardise=standardise)


def noisy(seed: int) -> Split:
    inputs, labels = make_classification(
        4000, n_features=32, n_informative=16, n_classes=8, flip_y=0.1, random_state=0
    )
    return _split(inputs, labels, 2000, seed, standardise=True)


@functools.cache
def _library(held_out: bool) -> Tensor:
    """Every tenth of the library's modules, or all the others, as one string of bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    chosen = [file for i, file in enumerate(files) if (i % 10 == 0) == held_out]
    return torch.frombuffer(
        bytearray(b"".join(file.read_bytes() for file in chosen)), dtype=torch.uint8
    )


def python_bytes(seed: int) -> Split:
    def rows(text: Tensor, num: int, seed: int) -> Rows:
        starts = random.Random(seed).sample(range(len(text) - CONTEXT), num)
        windows = torch.stack([text[s : s + CONTEXT + 1] for s in starts]).long()
        return Rows(windows[:, :-1], windows[:, 1:])

    return Split(rows(_library(False), 3200, seed), rows(_library(True), 512, 0))


def mlp(inputs: int, classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )


class ByteModel(nn.Module):
    """A transformer of two layers over bytes; 121k parameters, the embedding is also the head."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        # Classes come second, as cross_entropy wants them.
        return functional.linear(self.norm(x), self.embedding.weight).transpose(1, 2)


def accuracy(logits: Tensor, labels: Tensor) -> float:
    return 100 * float((logits.argmax(1) == labels).double().mean())


def nats(logits: Tensor, labels: Tensor) -> float:
    return float(functional.cross_entropy(logits, labels))


@dataclass(frozen=True)
class Task:
    data: Callable[[int], Split]
    model: Callable[[], nn.Module]
    score: Callable[[Tensor, Tensor], float]
    batch_size: int
    epochs: int
    optimizers: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]]


def _sgd(lr: float) -> Callable[[Iterable[Tensor]], torch.optim.Optimizer]:
    return functools.partial(torch.optim.SGD, lr=lr, momentum=0.9)


_DIGITS = Task(
    digits,
    functools.partial(mlp, 64, 10),
    accuracy,
    batch_size=32,
    epochs=20,
    optimizers={"sgd": _sgd(0.05), "adam": functools.partial(torch.optim.Adam, lr=0.004)},
)
TASKS = {
    "digits": _DIGITS,
    "digits-std": replace(_DIGITS, data=functools.partial(digits, standardise=True)),
    "noisy": replace(_DIGITS, data=noisy, model=functools.partial(mlp, 32, 8), epochs=10),
    "bytes": Task(
        python_bytes,
        ByteModel,
        nats,
        batch_size=8,
        epochs=1,
        optimizers={"adamw": functools.partial(torch.optim.AdamW, lr=0.004)},
    ),
}
