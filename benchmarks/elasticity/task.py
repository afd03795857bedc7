"""The task that all contenders train: digits, a small network, and a ledger of what was trained.

The data are the 1797 digits of scikit-learn. A global batch has 60 samples, so an epoch has 30
steps, and 60 divides by 1, 2 and 3 workers. Numbers are float64: a deviation is then a different
computation, and not rounding.

Each worker sleeps for `PAUSE` seconds per sample in `forward`. This stands for the time of an
accelerator: two cores can host three workers, and fewer workers take longer for a global batch.

The ledger of a worker is a file of its own. Before `optimizer.step()` the worker writes which
samples are in the step, and after it that the step is completed. Whatever dies, these lines stay.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

BATCH = 60
"""Samples of a global batch."""
EPOCHS = int(os.environ.get("ELASTICITY_EPOCHS", "10"))
PAUSE = float(os.environ.get("ELASTICITY_PAUSE", "0.005"))
"""Seconds per sample that stand for an accelerator."""
SAVE_EVERY = 20
"""Steps between two checkpoints, of all contenders that write files."""
FOLDER = Path(os.environ.get("ELASTICITY_FOLDER", "."))
"""Directory that all hosts share: checkpoints, ledgers and the final parameters."""
HOST = int(os.environ.get("ELASTICITY_HOST", "0"))
NUM_HOSTS = 3
"""Hosts at the start, and the most at any time."""

Place = tuple[str, int, int]
"""An id of the group of workers that make a step together, the rank in it, and its size."""


class Digits(Dataset[dict[str, Tensor]]):
    """The digits, each with its index."""

    def __init__(self) -> None:
        pixels, labels = load_digits(return_X_y=True)
        self.x, self.y = torch.tensor(pixels / 16), torch.tensor(labels)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index], "index": torch.tensor(index)}


class Net(nn.Module):
    """A small network that returns its loss, and knows which samples it has seen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10)).double()
        self.seen: list[int] = []
        """Samples since the last completed step."""

    def forward(self, x: Tensor, y: Tensor, index: Tensor) -> dict[str, Tensor]:
        time.sleep(PAUSE * len(index))
        self.seen += index.tolist()
        return {"loss": F.cross_entropy(self.layers(x), y)}


def make() -> tuple[Net, torch.optim.Optimizer, Digits]:
    """Network, optimizer and data."""
    torch.set_num_threads(1)
    net = Net()
    return net, torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9), Digits()


def alone() -> Place:
    return "alone", 0, 1


def in_group() -> Callable[[], Place]:
    """The place in the default process group, whose id rank 0 draws for all."""
    import torch.distributed as dist

    name = [uuid.uuid4().hex]
    dist.broadcast_object_list(name, src=0)
    place = name[0], dist.get_rank(), dist.get_world_size()
    return lambda: place


class Ledger:
    """What this worker has trained on.

    Args:
        net: The network.
        place: Tells the group in which the next step is made.
    """

    def __init__(self, net: Net, place: Callable[[], Place]) -> None:
        self._net, self._place, self._begun, self._life, self._left = net, place, 0, "", 0
        folder = FOLDER / "ledgers"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{time.time_ns()}-{HOST}-{os.getpid()}.jsonl"
        self._file = os.open(folder / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self._write(event="process")

    def _write(self, **facts: object) -> None:
        line = {"time": time.time(), "host": HOST, "pid": os.getpid(), **facts}
        os.write(self._file, (json.dumps(line) + "\n").encode())

    def begin(self, epoch: int, step: int) -> None:
        """Writes down, before `optimizer.step()`, what is in this step."""
        life, rank, replicas = self._place()
        if life != self._life:
            # A step that was given up by another group: its samples are not in this one.
            del self._net.seen[: self._left]
        self._life, self._begun = life, step
        self._write(
            event="begin",
            life=life,
            rank=rank,
            replicas=replicas,
            epoch=epoch,
            step=step,
            samples=self._net.seen,
        )

    def done(self, step: int) -> None:
        """Writes down, after `optimizer.step()`, that so many steps are completed."""
        if step == self._begun:
            self._write(event="done", life=self._life, step=step)
            self._net.seen.clear()
        self._left = len(self._net.seen)


def await_hosts() -> None:
    """Waits until all hosts of the start are there: some contenders would begin without them."""
    while len(list((FOLDER / "ledgers").iterdir())) < NUM_HOSTS:
        time.sleep(0.05)


def finish(net: nn.Module) -> None:
    """Keeps the final parameters; called by rank 0."""
    torch.save(net.state_dict(), FOLDER / "final.tmp")
    (FOLDER / "final.tmp").rename(FOLDER / "final.pt")


def loss_of(state: dict[str, Any]) -> float:
    """Loss of some parameters on all the data."""
    net, _, data = make()
    net.load_state_dict(state)
    with torch.no_grad():
        return float(F.cross_entropy(net.layers(data.x), data.y))
