"""A small language model: padding, token weights, AdamW, clipping, and a schedule per step.

    python examples/language_model.py
    torchrun --nproc-per-node 2 examples/language_model.py

It learns to write Python, byte by byte, from a few sources of the standard library. A sample is a
paragraph of code. Paragraphs differ in length, so a batch counts by its real tokens and not by its
padding. The recipe is made for a batch of 16 paragraphs; half-way, the batch grows to 64, and
learning rate, betas, weight decay and schedule follow.
"""

import math
import textwrap
import typing
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset, random_split

import resilin

LENGTH, WIDTH, HEADS, PAD = 64, 64, 4, -100


def paragraphs():
    """Bytes and the bytes that follow them; where a paragraph is over, there is no target."""
    samples = []
    for module in (textwrap, typing):
        for text in Path(module.__file__).read_text().split("\n\n"):
            data = torch.tensor(list(text.strip("\n").encode()[: LENGTH + 1]))
            if len(data) > 1:
                samples.append(data)
    padded = nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=PAD)
    return TensorDataset(padded[:, :-1].clamp(min=0), padded[:, 1:])


class Block(nn.Module):
    """Causal attention and a small network behind it."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH))

    def forward(self, x):
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, tokens):
        return self.blocks(self.bytes(tokens) + self.places.weight[: tokens.shape[1]])


def num_tokens(batch):
    """What a micro-batch weighs: the targets that are there."""
    _, targets = batch
    return (targets != PAD).sum()


def mean_loss(model, tokens, targets):
    # The mean over the micro-batch's own tokens. The model weighs it by `num_tokens`.
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=PAD)


def test(model, loader):
    model.eval()
    stats = resilin.Accumulator()
    with torch.no_grad():
        for tokens, targets in loader:
            count = num_tokens((tokens, targets))
            stats["loss"] += mean_loss(model, tokens, targets) * count
            stats["tokens"] += count
    with stats.synchronized():
        return stats["loss"] / stats["tokens"]


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    resilin.init_process_group()
    # On two replicas both would print the same; this one prints.
    first = resilin.plan(1).master

    data = paragraphs()
    train_set, test_set = random_split(data, [0.9, 0.1], torch.Generator().manual_seed(0))
    loader = resilin.AdaptiveDataLoader(
        train_set, batch_size=16, shuffle=True, max_local_bsz=32, batch_weight=num_tokens
    )
    test_loader = resilin.AdaptiveDataLoader(test_set, batch_size=64)
    total = EPOCHS * len(loader)
    loader.set_batch_size(resilin.Schedule(lambda step: 16 if step < total / 2 else 64))

    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / 10, 0.5 * (1 + math.cos(math.pi * min(1, step / total)))),
    )
    # Warm-up and cosine are written per step of the reference batch. By the clock of the rule,
    # they end when training ends, whatever the steps are worth.
    model = resilin.AdaptiveDataParallel(model, optimizer, scheduler, schedule_by="rule")

    if first:
        print(f"{len(data)} paragraphs, {total} reference steps")
        print(" step  progress  batch  loss  gain  noise scale      lr")
    for epoch in resilin.remaining_epochs_until(EPOCHS):
        model.train()
        for tokens, targets in loader:
            loss = mean_loss(model, tokens, targets)
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    print(epoch)


if __name__ == "__main__":
    main()
