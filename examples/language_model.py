"""A small language model: padding, token weights, AdamW, clipping, and a schedule per step.

    python examples/language_model.py
    torchrun --nproc-per-node 2 examples/language_model.py
    torchrun --nproc-per-node 4 examples/language_model.py --shard tp

It learns to write lines of Python, byte by byte, from a source file of the standard library. Lines
differ in length, so a batch counts by its real tokens and not by its padding. The recipe is made
for a global batch of 16 lines. Half-way the batch grows to 64, and learning rate, betas, weight
decay and schedule follow. With `--shard` the model is divided among the processes, and nothing else
changes: by FSDP, by HSDP (two copies), or with tensor parallelism in pairs of processes besides.
"""

import argparse
import dataclasses
import math
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import random_split

import resilin
from resilin import current_job

LENGTH, WIDTH, HEADS, EPOCHS = 80, 64, 4, 2
PAD = -100


def lines():
    """The lines of dataclasses.py, as bytes, each with its end."""
    text = Path(dataclasses.__file__).read_text()
    return [torch.tensor([*line.encode(), 10]) for line in text.splitlines() if line.strip()]


def pad(batch):
    """Bytes, and for each of them the one that follows; after the end there is no target."""
    targets = pad_sequence(batch, batch_first=True, padding_value=PAD)[:, :LENGTH]
    return F.pad(targets[:, :-1].clamp(min=0), (1, 0)), targets


def num_tokens(batch):
    """Weight of a micro-batch."""
    _, targets = batch
    return (targets != PAD).sum()


class Block(nn.Module):
    """Attention to earlier tokens, followed by a small network."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH))

    def forward(self, x):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, tokens):
        return self.blocks(self.bytes(tokens) + self.places.weight[: tokens.shape[1]])


def shard(model, how):
    """Divides the parameters among all processes."""
    num = dist.get_world_size()
    if how == "fsdp":
        mesh = init_device_mesh("cpu", (num,))
    elif how == "hsdp":
        mesh = init_device_mesh("cpu", (2, num // 2), mesh_dim_names=("copies", "data"))
    else:
        both = init_device_mesh("cpu", (num // 2, 2), mesh_dim_names=("data", "tensor"))
        for block in model.blocks[:2]:
            plan = {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()}
            parallelize_module(block, both["tensor"], plan)
        mesh = both["data"]
    for block in model.blocks[:2]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def mean_loss(model, tokens, targets):
    # The mean over the micro-batch's own tokens; the loader says how many they are.
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
    parser = argparse.ArgumentParser()
    parser.add_argument("--shard", choices=("none", "fsdp", "hsdp", "tp"), default="none")
    how = parser.parse_args().shard

    torch.set_num_threads(1)
    torch.manual_seed(0)
    resilin.init_process_group()
    master = current_job().engine.membership.is_first

    train_set, test_set = random_split(lines(), [0.9, 0.1], torch.Generator().manual_seed(0))
    loader = resilin.AdaptiveDataLoader(
        train_set,
        batch_size=16,
        shuffle=True,
        max_local_bsz=32,
        collate_fn=pad,
        batch_weight=num_tokens,
    )
    test_loader = resilin.AdaptiveDataLoader(test_set, batch_size=64, collate_fn=pad)
    total = EPOCHS * len(loader)
    loader.set_batch_size(lambda clock: 16 if clock.progress < total / 2 else 64)

    model = LanguageModel()
    if how != "none":
        shard(model, how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    # Warm-up and cosine, written per step of the reference batch. The clock of the rule steps
    # them, so that they end when training ends, whatever a step is worth.
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / 10, 0.5 + 0.5 * math.cos(math.pi * min(1, step / total))),
    )
    model = resilin.AdaptiveDataParallel(model, optimizer, scheduler, schedule_by="rule")

    if master:
        print(f"{len(train_set)} lines, {total} reference steps")
    printed = 0
    for epoch in resilin.remaining_epochs_until(EPOCHS):
        model.train()
        for tokens, targets in loader:
            loss = mean_loss(model, tokens, targets)
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if master and model.progress >= printed + 20:
                printed = model.progress
                # One process does not split the reference batch to measure its noise.
                noise = "unknown" if model.noise is None else f"{model.noise.phi:.0f} tokens"
                print(
                    f"step {model.clock.steps:>4}  progress {model.progress:>6.1f}  "
                    f"loss {loss.item():.2f}  scale {model.scale:.0f}  gain {model.gain:.2f}  "
                    f"noise scale {noise}  lr x {model.factors[0].lr:.2f}",
                    flush=True,
                )
        loss = test(model, test_loader)
        if master:
            print(f"epoch {epoch}: test loss {loss:.3f}", flush=True)


if __name__ == "__main__":
    main()
