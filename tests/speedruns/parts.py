"""What the loops of this folder share: a language model, its text, optimizers of two code bases."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

WIDTH, WINDOW, STEPS = 16, 16, 24
MICRO_BATCH, ACCUMULATED = 4, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, False), nn.Linear(WIDTH, WIDTH, False)
        self.up, self.down = nn.Linear(WIDTH, 64, False), nn.Linear(64, WIDTH, False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(F.rms_norm(x, (WIDTH,))).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.relu(self.up(F.rms_norm(x, (WIDTH,)))).square())


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 256, False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def make_model() -> GPT:
    torch.manual_seed(0)
    return GPT().double()


def windows() -> tuple[Tensor, Tensor]:
    """Inputs and targets of a run, in order."""
    text = torch.tensor([*Path(dataclasses.__file__).read_bytes()])
    starts = torch.arange(STEPS * MICRO_BATCH * ACCUMULATED) * WINDOW
    rows = text[starts[:, None] + torch.arange(WINDOW + 1)]
    return rows[:, :-1], rows[:, 1:]


def orthogonal(matrices: Tensor) -> Tensor:
    """About the nearest matrices of which all singular values are 1."""
    x = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


class MuonAdamW(torch.optim.Optimizer):
    """One class for all parameters, as in nanochat: a group says by `kind` which of the two it is.

    Parameters of a Muon group have one shape; its state is a stack that belongs to the first.
    """

    def __init__(self, groups: list[dict]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            (self._muon if group["kind"] == "muon" else self._adamw)(group)

    def _adamw(self, group: dict) -> None:
        beta1, beta2 = group["betas"]
        for p in group["params"]:
            state = self.state[p]
            if not state:
                state |= {
                    "step": 0,
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }
            state["step"] += 1
            p.mul_(1 - group["lr"] * group["weight_decay"])
            state["exp_avg"].lerp_(p.grad, 1 - beta1)
            state["exp_avg_sq"].lerp_(p.grad.square(), 1 - beta2)
            second = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt() + group["eps"]
            p.sub_(group["lr"] / (1 - beta1 ** state["step"]) * state["exp_avg"] / second)

    def _muon(self, group: dict) -> None:
        params = group["params"]
        grads, stacked = torch.stack([p.grad for p in params]), torch.stack(params)
        state = self.state[params[0]]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(grads)
        buffer = state["momentum_buffer"].lerp_(grads, 1 - group["momentum"])
        update = orthogonal(grads.lerp(buffer, group["momentum"]))
        stacked.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * update)
        torch._foreach_copy_(params, list(stacked.unbind()))


def setup_optimizer(model: GPT) -> MuonAdamW:
    """Groups as nanochat makes them: Muon for each shape of matrices, AdamW for the rest."""
    matrices = list(model.blocks.parameters())
    adamw = {"kind": "adamw", "betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.0}
    groups = [
        {**adamw, "params": [*model.head.parameters()], "lr": 0.004},
        {**adamw, "params": [*model.embedding.parameters()], "lr": 0.02},
    ]
    for shape in sorted({p.shape for p in matrices}):
        params = [p for p in matrices if p.shape == shape]
        muon = {"kind": "muon", "params": params, "momentum": 0.85, "weight_decay": 0.2, "lr": 0.02}
        groups.append(muon)
    optimizer = MuonAdamW(groups)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


class OptimizersContainer(torch.optim.Optimizer):
    """Several optimizers as one, as torchtitan has it: its own groups have parameters only."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        params = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        super().__init__(params, {})

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)


class LRSchedulersContainer:
    """A scheduler for each optimizer of a container, of one lambda."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self.schedulers = [LambdaLR(o, lambda step: 1 - step / (2 * STEPS)) for o in optimizers]

    def step(self) -> None:
        for scheduler in self.schedulers:
            scheduler.step()


def build_optimizers(model: GPT) -> OptimizersContainer:
    matrices = list(model.blocks.parameters())
    rest = [*model.embedding.parameters(), *model.head.parameters()]
    return OptimizersContainer(
        [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01, betas=(0.9, 0.95))]
    )
