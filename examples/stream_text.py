"""A small transformer on packed text from a stream, which nobody has counted or indexed.

    python examples/stream_text.py
    resilin run --nproc 2 examples/stream_text.py

The text is the source of a package of the standard library, file by file. Files are read in
order, documents (paragraphs) are shuffled within a shard, and their bytes are packed into rows of
64. Kill a worker, or the whole job, and start it again with another number of replicas: it goes on
with the next row. No token of the epoch is lost or repeated.
"""

import email
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import resilin
from resilin.streams import FileStream, Packed, Shuffled

LENGTH, WIDTH, EPOCHS = 64, 64, 2


def paragraphs(path):
    """The documents of one file."""
    return path.read_text().split("\n\n")


def to_bytes(text):
    return list(text.encode())


def rows(files, num_shards):
    """Rows of tokens: an input, and one more as the last target."""
    documents = FileStream(files, paragraphs, num_shards=num_shards, shuffle=True)
    shuffled = Shuffled(documents, buffer_size=64)
    return Packed(shuffled, LENGTH + 1, tokens=to_bytes, separator=0)


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, tokens):
        x = self.bytes(tokens) + self.places.weight
        return self.head(self.layers(x, mask=self.mask, is_causal=True))


def num_targets(batch):
    """Weight of a micro-batch: the last row of a shard is filled up, and that does not count."""
    return (batch["num_tokens"] - 1).sum()


def mean_loss(model, batch):
    tokens = batch["input_ids"]
    losses = F.cross_entropy(model(tokens[:, :-1]).mT, tokens[:, 1:], reduction="none")
    real = torch.arange(LENGTH) < batch["num_tokens"][:, None] - 1
    return (losses * real).sum() / real.sum().clamp(min=1)


def evaluate(model, loader):
    model.eval()
    stats = resilin.Accumulator()
    with torch.no_grad():
        for batch in loader:
            stats["loss"] += mean_loss(model, batch) * num_targets(batch)
            stats["tokens"] += num_targets(batch)
    model.train()
    with stats.synchronized():
        return stats["loss"] / stats["tokens"]


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    resilin.init_process_group()
    first = resilin.current_job().engine.membership.is_first
    if first:
        print(f"replica 0 is process {os.getpid()}", flush=True)

    files = sorted(Path(email.__file__).parent.glob("[a-m]*.py"))
    loader = resilin.AdaptiveDataLoader(
        rows(files[2:], num_shards=8), batch_size=32, batch_weight=num_targets, num_workers=1
    )
    test_loader = resilin.AdaptiveDataLoader(rows(files[:2], num_shards=2), batch_size=64)

    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model = resilin.AdaptiveDataParallel(model, optimizer, rule="adamscale")
    for epoch in resilin.remaining_epochs_until(EPOCHS):
        stats = resilin.Accumulator()
        for batch in loader:
            if loader.current_samples:
                stats["rows"] += loader.current_samples
                stats["tokens"] += int(batch["num_tokens"].sum())
            loss = mean_loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if first and model.clock.steps % 20 == 0:
                print(f"step {model.clock.steps:>4}  loss {loss.item():.2f}", flush=True)
        with stats.synchronized():
            used = f"{stats['rows']:.0f} rows, {stats['tokens']:.0f} tokens"
        loss = evaluate(model, test_loader)
        if first:
            print(f"epoch {epoch}: {used}, test loss {loss:.3f}", flush=True)


if __name__ == "__main__":
    main()
