"""A job over packs of shuffled documents of files, which dies where a test says.

The model counts how often each token was in a committed step: `seen` has the gradient 1/B for each
token of a step of B packs, and a learning rate of 1.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

import resilin
from resilin.streams import FileStream, Packed, Shuffled

FOLDER = Path(os.environ.get("KILL_TEST_FOLDER", "."))
FAULTS = json.loads(os.environ.get("KILL_TEST_FAULTS", "[]"))
RANK = int(os.environ.get("RANK", "0"))
PACKS = (14, 10, 6, 18)
"""Packs of each shard, as many as fill whole batches."""
LENGTH, BATCH, EPOCHS = 5, 8, 3
STEPS = sum(PACKS) // BATCH
"""Steps in an epoch."""
TOKENS = sum(PACKS) * LENGTH


def write_files(folder: Path) -> None:
    """Two files for each shard; no token is in two documents."""
    tokens = iter(range(TOKENS))
    for number in range(2 * len(PACKS)):
        num = PACKS[number % len(PACKS)] * LENGTH
        # The first file of a shard ends within a pack.
        left, documents = num // 2 + 1 if number < len(PACKS) else num - num // 2 - 1, []
        while left:
            size = min(left, 1 + len(documents) * 3 % 8)
            documents.append([next(tokens) for _ in range(size)])
            left -= size
        text = "".join(json.dumps(document) + "\n" for document in documents)
        (folder / f"{number}.jsonl").write_text(text)


def read(path: Path):
    """The documents of one file."""
    with path.open() as file:
        yield from map(json.loads, file)


def mark(text: str) -> None:
    with (FOLDER / "marks").open("a") as file:
        file.write(text + "\n")


def die(place: str, step: int) -> None:
    """Kills this process if a fault is due here that has not been yet."""
    for rank, at, when in FAULTS:
        text = f"{at} {when} {rank}"
        if (rank, at, when) == (RANK, place, step) and text not in marks():
            mark(text)
            await_checkpoint()
            os.kill(os.getpid(), signal.SIGKILL)


def await_checkpoint() -> None:
    """Waits for a checkpoint: a thread writes it beside the next steps."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not any((FOLDER / "checkpoints").glob("step-*")):
        time.sleep(0.01)


def marks() -> list[str]:
    path = FOLDER / "marks"
    return path.read_text().splitlines() if path.exists() else []


class Net(nn.Module):
    """A small network that counts its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 4)
        self.out = nn.Linear(4, 1)
        self.seen = nn.Parameter(torch.zeros(TOKENS))

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.out(torch.tanh(self.embedding(tokens)).mean(1)), self.seen[tokens].sum(1)


def main() -> None:
    """Trains, and writes down what came of it."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    resilin.init_process_group()
    net = Net().double()
    trained = [*net.embedding.parameters(), *net.out.parameters()]
    optimizer = torch.optim.SGD(
        [{"params": trained, "lr": 0.05, "momentum": 0.9}, {"params": [net.seen], "lr": 1.0}]
    )
    model = resilin.AdaptiveDataParallel(net, optimizer, rule="constant")
    files = [FOLDER / f"{number}.jsonl" for number in range(2 * len(PACKS))]
    stream = Packed(Shuffled(FileStream(files, read, num_shards=len(PACKS)), 5), LENGTH)
    loader = resilin.AdaptiveDataLoader(stream, batch_size=BATCH, shuffle=True, num_workers=2)
    resilin.checkpoint_to(FOLDER / "checkpoints", every=1, memory_every=1)
    for epoch in resilin.remaining_epochs_until(EPOCHS):
        for batch in loader:
            step = model.clock.steps
            optimizer.zero_grad()
            tokens = batch["input_ids"]
            output, seen = model(tokens)
            output.register_hook(lambda _, now=step: die("backward", now))
            target = torch.sin(tokens.double().sum(1, keepdim=True))
            (((output - target) ** 2).mean() + seen.mean()).backward()
            optimizer.step()
            if model.clock.steps > step:
                die("after_step", step)
        die("end_of_epoch", model.clock.steps)
        counts = sorted({round(-BATCH * float(value), 9) for value in net.seen.detach()})
        mark("epoch " + json.dumps([epoch, counts]))
    mark("end " + json.dumps([float(value) for p in trained for value in p.detach().flatten()]))


if __name__ == "__main__":
    main()
