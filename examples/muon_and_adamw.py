"""Muon for the matrices of a small language model, AdamW for the rest: two optimizers, one step.

    python examples/muon_and_adamw.py
    resilin run --live --nproc 2 examples/muon_and_adamw.py

The model learns to write Python, byte by byte. The recipe is made for 8 windows per step. With
`--grow` a step of the second epoch has 32: both optimizers follow, each group by its own noise.
`--double` trains in float64, in which final parameters can be compared to the last digits.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

import resilin

WIDTH, WINDOW, EPOCHS, STEPS = 32, 32, 2, 64


class Block(nn.Module):
    """Attention to earlier bytes, followed by a small network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(WINDOW, WIDTH)
        self.blocks = nn.Sequential(Block(), Block(), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.bytes(tokens) + self.places.weight))


def windows() -> TensorDataset:
    text = torch.tensor([*Path(dataclasses.__file__).read_bytes()])
    starts = torch.arange(0, 256 * WINDOW, WINDOW)
    rows = text[starts[:, None] + torch.arange(WINDOW + 1)]
    return TensorDataset(rows[:, :-1], rows[:, 1:])


def main() -> nn.Module:
    parser = argparse.ArgumentParser()
    parser.add_argument("--double", action="store_true")
    parser.add_argument("--grow", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    net = LanguageModel().to(torch.float64 if args.double else torch.float32)

    matrices = [p for p in net.blocks.parameters() if p.dim() == 2]
    known = set(matrices)
    rest = [p for p in net.parameters() if p not in known]
    muon = torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.1)
    adamw = torch.optim.AdamW(rest, lr=0.003, betas=(0.9, 0.95))
    schedules = [LambdaLR(o, lambda step: max(0.1, 1 - step / STEPS)) for o in (muon, adamw)]

    resilin.init_process_group()
    model = resilin.AdaptiveDataParallel(
        net, [muon, adamw], schedules, rule=["muonscale", "adamscale"], schedule_by="rule"
    )
    loader = resilin.AdaptiveDataLoader(windows(), batch_size=8, shuffle=True, max_local_bsz=4)
    resilin.checkpoint_to(None)

    for epoch in resilin.remaining_epochs_until(EPOCHS):
        loader.set_batch_size(32 if args.grow and epoch == 1 else 8)
        stats = resilin.Accumulator()
        for tokens, targets in loader:
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            model.clip_grad_norm_(1.0)
            muon.step()
            adamw.step()
            muon.zero_grad()
            adamw.zero_grad()
            stats["loss"] += loss.item() * loader.current_samples
            stats["samples"] += loader.current_samples
        with stats.synchronized():
            mean = stats["loss"] / stats["samples"]
        if resilin.current_job().engine.membership.is_first:
            told = f"{model.clock.steps} steps, progress {model.progress:.1f}"
            print(f"epoch {epoch}: loss {mean:.2f} after {told}")
    return net


if __name__ == "__main__":
    main()
