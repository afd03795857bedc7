"""`ElasticTrainer` and the stock Trainer in two processes, on the same samples in the same order.

Each process of the stock Trainer takes every second batch of the sequential order, so a step of
both Trainers has the same samples, though not in the same processes. Parameters then differ by
rounding alone. Where they differ by more, the reason is in the stock Trainer, and a test shows it:
if that one fails, upstream has changed, and the table in `docs/guides/huggingface.md` is outdated.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("transformers")
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
)

import resilin
from resilin.integrations.transformers import ElasticTrainer
from tests.integrations.parts import everywhere
from tests.integrations.trainers import arguments

LENGTH, WORDS, CLASSES, MICRO, STEPS, RATE = 6, 11, 3, 2, 3, 0.05
PRELOAD = ("datasets", "transformers.trainer", "resilin.integrations.transformers")
pytestmark = [
    pytest.mark.nightly(part="frameworks"),
    pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified"),
]


class Rows(torch.utils.data.Dataset):
    """Samples of one kind: rows of numbers, or of words with another number of labels each.

    The first `again` of them are there a second time, at the end.
    """

    def __init__(self, kind: str, num: int, again: int = 0) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(num, 4, generator=generator)
        self.words = torch.randint(1, WORDS, (num, LENGTH), generator=generator)
        self.lengths = torch.randint(2, LENGTH + 1, (num,), generator=generator)
        self.kind, self.num, self.again = kind, num, again

    def __len__(self) -> int:
        return self.num + self.again

    def __getitem__(self, index):
        index %= self.num
        words = self.words[index]
        if self.kind == "causal":
            labels = words.clone()
            labels[self.lengths[index] :] = -100
            return {"input_ids": words, "labels": labels}
        if self.kind == "classification":
            return {"input_ids": words, "labels": int(words.sum()) % CLASSES}
        return {"x": self.x[index], "labels": self.x[index].sum()}


class Plain(nn.Module):
    """A model of the user, whose loss is a mean over the samples of the call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x, labels):
        return {"loss": F.mse_loss(self.layer(x)[:, 0], labels)}


class Swallows(Plain):
    """The same, with a signature that takes anything, and so `num_items_in_batch` too."""

    def forward(self, x, labels, **kwargs):
        return super().forward(x, labels)


def net(kind: str) -> nn.Module:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": WORDS,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": LENGTH,
    }
    if kind == "causal":
        return LlamaForCausalLM(LlamaConfig(**sizes))
    if kind == "classification":
        off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return BertForSequenceClassification(BertConfig(**sizes, **off, num_labels=CLASSES))
    return Swallows() if kind == "swallows" else Plain()


def trained(
    directory,
    kind,
    *,
    elastic,
    accumulation=1,
    data=None,
    takes_items=None,
    steps=STEPS,
    **settings,
):
    """Parameters after a few steps, and the losses that were logged."""
    resilin.reset_job()
    batch = 2 * MICRO * accumulation
    common = {
        "per_device_train_batch_size": MICRO,
        "train_sampling_strategy": "sequential",
        "lr_scheduler_type": "linear",
        "learning_rate": RATE,
        "num_train_epochs": 1,
        "gradient_accumulation_steps": 1 if elastic else accumulation,
    }
    model, args = net(kind), arguments(directory, **{**common, **settings})
    data = Rows(kind, steps * batch) if data is None else data
    own = {"batch_size": batch, "rule": "linear"} if elastic else {}
    trainer = (ElasticTrainer if elastic else Trainer)(
        model=model, args=args, train_dataset=data, **own
    )
    trainer.remove_callback(PrinterCallback)
    if takes_items is not None:
        trainer.model_accepts_loss_kwargs = takes_items
    trainer.train()
    assert trainer.state.global_step == steps
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    parameters = flat(model)
    a, b = everywhere(parameters)
    assert torch.equal(a, b)
    return parameters, losses


def flat(model):
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def assert_same(kind, ours, stock, losses_times=1):
    moved = (ours[0] - flat(net(kind))).norm()
    assert moved > 0.01
    # Rounding in float32; the steps of AdamW magnify it where a gradient is nearly zero.
    assert (ours[0] - stock[0]).norm() < 1e-4 * moved
    assert [losses_times * each for each in ours[1]] == pytest.approx(stock[1], rel=1e-5)


@pytest.mark.world_size(2)
def test_two_processes_train_the_parameters_of_the_stock_trainer(tmp_path):
    kinds = {"causal": None, "plain": None, "classification": False}
    ways = itertools.product(("sgd", "adamw_torch"), (1, 2))
    for (optim, accumulation), (kind, takes_items) in itertools.product(ways, kinds.items()):
        settings = {"optim": optim, "accumulation": accumulation, "max_grad_norm": 0.5}
        ours = trained(tmp_path, kind, elastic=True, **settings)
        # Bert's head takes `num_items_in_batch`, and does not use it: below.
        stock = trained(tmp_path, kind, elastic=False, takes_items=takes_items, **settings)
        assert_same(kind, ours, stock)


@pytest.mark.world_size(2)
def test_the_two_differ_where_the_stock_trainer_multiplies_a_loss_or_repeats_samples(tmp_path):
    # A model that takes `num_items_in_batch` and averages over its own batch: the stock Trainer
    # multiplies the loss by the number of processes, and does not divide it by the accumulation.
    for kind, accumulation in itertools.product(("classification", "swallows"), (1, 2)):
        ours = trained(tmp_path, kind, elastic=True, accumulation=accumulation)
        times = 2 * accumulation
        rate = {"learning_rate": RATE / times}
        stock = trained(tmp_path, kind, elastic=False, accumulation=accumulation, **rate)
        assert_same(kind, ours, stock, losses_times=times)
    # The last batch of an epoch is filled up with samples of its start, for all processes.
    rest, filled = 2 * 2 * MICRO + 1, 3 * 2 * MICRO
    stock = trained(tmp_path, "plain", elastic=False, data=Rows("plain", rest))
    again = Rows("plain", rest, filled - rest)
    assert_same("plain", trained(tmp_path, "plain", elastic=True, data=again), stock)
    once = trained(tmp_path, "plain", elastic=True, data=Rows("plain", rest))
    assert (once[0] - stock[0]).norm() > 0.01 * (once[0] - flat(net("plain"))).norm()
