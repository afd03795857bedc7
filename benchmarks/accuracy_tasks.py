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
from sklearn.datasets import load_digits, make_classification, make_friedman1
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.nn import functional

CONTEXT = 64
"""Bytes in a window of the byte model."""
NUM_MODULES, MODULE_ROWS, WINDOW, BUCKETS = 20, 100, 256, 1024
"""Classes of `modules`, rows of each, bytes of a row, and buckets its trigrams are hashed to."""


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


def images(seed: int) -> Split:
    """Digits as images of one channel."""

    def shaped(rows: Rows) -> Rows:
        pixels, labels = rows.columns
        return Rows(pixels.view(-1, 1, 8, 8), labels)

    return Split(*map(shaped, digits(seed)))


def noisy(seed: int, *, num_train: int = 2000) -> Split:
    inputs, labels = make_classification(
        num_train + 2000, n_features=32, n_informative=16, n_classes=8, flip_y=0.1, random_state=0
    )
    return _split(inputs, labels, num_train, seed, standardise=True)


def friedman(seed: int) -> Split:
    """Friedman's first function of five of ten inputs, with unit noise; the target standardised."""
    inputs, targets = make_friedman1(4000, noise=1.0, random_state=0)
    # Standardised by all rows: a scale of the loss, which the learning rate was chosen for.
    targets = ((targets - targets.mean()) / targets.std()).astype("float32")
    return _split(inputs, targets, 1000, seed, standardise=True)


def _as_bytes(files: Iterable[Path]) -> Tensor:
    return torch.frombuffer(
        bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8
    )


def _modules() -> list[Path]:
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


@functools.cache
def _library(held_out: bool) -> Tensor:
    """Every tenth of the library's modules, or all the others, as one string of bytes."""
    return _as_bytes(file for i, file in enumerate(_modules()) if (i % 10 == 0) == held_out)


@functools.cache
def _largest_modules() -> list[Tensor]:
    """The largest modules of the library."""
    largest = sorted(_modules(), key=lambda file: file.stat().st_size)[-NUM_MODULES:]
    return [_as_bytes([file]) for file in largest]


def modules(seed: int) -> Split:
    """Which of the library's largest modules is a window of text from?

    A window is its trigrams of bytes, hashed. The last fifth of each module is the test.
    """

    def rows(test: bool, num: int, seed: int) -> Rows:
        rng = random.Random(seed)
        windows, labels = [], []
        for label, text in enumerate(_largest_modules()):
            border = len(text) * 4 // 5
            low, high = (border, len(text)) if test else (0, border)
            for start in rng.sample(range(low, high - WINDOW), num):
                windows.append(text[start : start + WINDOW])
                labels.append(label)
        bytes_ = torch.stack(windows).long()
        trigrams = bytes_[:, :-2] * 65_599 + bytes_[:, 1:-1] * 257 + bytes_[:, 2:] * 31
        return Rows(trigrams % BUCKETS, torch.tensor(labels))

    return Split(rows(False, MODULE_ROWS, seed), rows(True, MODULE_ROWS, 0))


def python_bytes(seed: int, *, num_train: int = 3200) -> Split:
    def rows(text: Tensor, num: int, seed: int) -> Rows:
        starts = random.Random(seed).sample(range(len(text) - CONTEXT), num)
        windows = torch.stack([text[s : s + CONTEXT + 1] for s in starts]).long()
        return Rows(windows[:, :-1], windows[:, 1:])

    return Split(rows(_library(False), num_train, seed), rows(_library(True), 512, 0))


def mlp(inputs: int, classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )


def bag(classes: int, width: int = 32) -> nn.Module:
    """A sum of embeddings and a layer: most rows of the table have no gradient in most steps."""
    table = nn.EmbeddingBag(BUCKETS, width, mode="sum")
    nn.init.normal_(table.weight, std=WINDOW**-0.5)
    return nn.Sequential(table, nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, classes))


def conv_net() -> nn.Module:
    """Two convolutions with BatchNorm over images of 8 by 8; 6k parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


class ByteModel(nn.Module):
    """A transformer of two layers over bytes; the embedding is also the head."""

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


def likelihood(logits: Tensor, labels: Tensor) -> float:
    """Nats per byte, such that more is better."""
    return -nats(logits, labels)


def explained(outputs: Tensor, targets: Tensor) -> float:
    """Percent of the variance of the targets that the outputs explain."""
    left = (outputs[:, 0] - targets).double().square().mean()
    return 100 * (1 - float(left / targets.double().var(correction=0)))


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.mse_loss(outputs[:, 0], targets)


Make = Callable[[nn.Module], list[torch.optim.Optimizer]]
"""Makes the optimizers of a model."""


@dataclass(frozen=True)
class Task:
    data: Callable[[int], Split]
    model: Callable[[], nn.Module]
    score: Callable[[Tensor, Tensor], float]
    batch_size: int
    epochs: int
    optimizers: dict[str, Make]
    loss: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy
    micro_batch: int | None = None
    """At most so many samples at once; the batch size if None."""


def _one(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Make:
    return lambda model: [kind(model.parameters(), **options)]


_sgd = functools.partial(_one, torch.optim.SGD, momentum=0.9)


def _muon(*inner: str, lr: float, adamw_lr: float) -> Make:
    """Muon for the matrices of these modules, AdamW for the rest."""

    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        modules = [model.get_submodule(name) for name in inner]
        matrices = [p for module in modules for p in module.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
        muon = torch.optim.Muon(matrices, lr=lr, weight_decay=0.1)
        return [muon, torch.optim.AdamW(others, lr=adamw_lr, betas=(0.9, 0.95))]

    return make


_DIGITS = Task(
    digits,
    functools.partial(mlp, 64, 10),
    accuracy,
    batch_size=32,
    epochs=20,
    optimizers={"sgd": _sgd(lr=0.05), "adam": _one(torch.optim.Adam, lr=0.004)},
)
_NOISY = replace(_DIGITS, data=noisy, model=functools.partial(mlp, 32, 8), epochs=10)
TASKS = {
    "digits": _DIGITS,
    "digits-std": replace(_DIGITS, data=functools.partial(digits, standardise=True)),
    "noisy": _NOISY,
    "fresh": replace(
        _NOISY,
        data=functools.partial(noisy, num_train=20_000),
        epochs=1,
        optimizers={"sgd": _sgd(lr=0.05), "muon": _muon("0", "2", lr=0.02, adamw_lr=0.008)},
    ),
    "conv": replace(
        _DIGITS,
        data=images,
        model=conv_net,
        optimizers={"sgd": _sgd(lr=0.1, nesterov=True, weight_decay=5e-4)},
    ),
    "friedman": Task(
        friedman,
        functools.partial(mlp, 10, 1),
        explained,
        batch_size=32,
        epochs=20,
        optimizers={"sgd": _sgd(lr=0.05)},
        loss=squared_error,
    ),
    "modules": Task(
        modules,
        functools.partial(bag, NUM_MODULES),
        accuracy,
        batch_size=32,
        epochs=10,
        optimizers={"sgd": _sgd(lr=0.05)},
    ),
    "bytes": Task(
        python_bytes,
        ByteModel,
        nats,
        batch_size=8,
        epochs=1,
        optimizers={"adamw": _one(torch.optim.AdamW, lr=0.004)},
    ),
    "gpt": Task(
        functools.partial(python_bytes, num_train=19_200),
        functools.partial(ByteModel, 32),
        likelihood,
        batch_size=4,
        epochs=1,
        optimizers={"muon": _muon("blocks", lr=0.02, adamw_lr=0.003)},
        micro_batch=8,
    ),
}
