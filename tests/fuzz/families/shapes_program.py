"""The programs of the family `shapes`, with options.

A loop is one function that is given its model, loaders and epochs by a kit: `Elastic` has those of
resilin, `Plain` has stock PyTorch in one process, and is the oracle.
"""

from __future__ import annotations

import itertools
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

import resilin
from resilin.core.stream import SampleStream
from tests.fuzz import hooks, parts
from tests.fuzz.hooks import kill_point
from tests.fuzz.program import Program

CLAMP = 0.02
MAX_NORM = 0.3


class Rows(Dataset):
    """The data of the other programs, of which a loop may change something."""

    def __init__(self, data: Any, first: int = 0, *, broken: bool = False) -> None:
        self.data, self.first, self.broken = data, first, broken
        self.strength = 1.0
        self.num = len(data) - first

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Any:
        x, *others = self.data[self.first + index]
        return None if self.broken and index % 5 == 3 else (x * self.strength, *others)


class OfDicts(nn.Module):
    """A model of inputs of different sizes, which returns its losses."""

    def __init__(self, net: parts.Net) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        x = torch.stack([each["image"].mean(1) for each in inputs])
        idx = torch.stack([each["idx"] for each in inputs])
        out, seen = self.net(x, idx)
        far = out - torch.stack([each["y"] for each in inputs])
        return {
            "box": torch.nn.functional.huber_loss(far, torch.zeros_like(far)),
            "seen": seen.mean(),
        }


class Kit:
    """Model, optimizer and data of a program; what they are put into comes from below."""

    model: Any
    clock: Any

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.changed: dict[Tensor, Tensor] = {}
        """What parameters were before a hook has changed them."""
        get = options.get
        self.p = p = Program(
            data_seed=get("data_seed", 0),
            num_samples=get("num_samples", 22),
            batch_size=get("batch_size", 4),
            epochs=get("epochs", 2),
            shuffle=get("shuffle", True),
            net="mlp",
            optimizer=get("optimizer", "momentum"),
            rule="constant" if options["shape"] == "filtered" else "linear",
        )
        self.total = p.epochs * -(-p.num_samples // p.batch_size)
        """Steps after which an endless loop ends."""
        self.data = parts.train_data(p)
        self.net = parts.make_net(p)
        self.module: nn.Module = self.net
        if options["shape"] == "detectron":
            self.module = OfDicts(self.net)
        self.optimizer = parts.make_optimizer(p, self.net)
        self.scaler = parts.make_scaler() if get("scaler") else None
        self.ema = parts.Ema(self.net)
        self.history = parts.History()

    def main_loader(self, data: Any = None, **settings: Any) -> Any:
        """The loader that most programs have one of."""
        if collate := self.options.get("collate"):
            settings["collate_fn"] = parts.COLLATES[collate]
        loader = self.loader(data or Rows(self.data), self.p.batch_size, **settings)
        if trace := self.options.get("trace"):
            loader.set_batch_size(lambda clock: trace[min(clock.steps // 2, len(trace) - 1)])
        return loader

    def loader(self, data: Any, batch_size: int, **settings: Any) -> Any:
        raise NotImplementedError

    def epochs(self) -> Iterable[int]:
        raise NotImplementedError

    def read(self, batches: Iterable[Any]) -> Iterable[Any]:
        """The batches as the loop reads them."""
        reader = self.options.get("reader")
        return batches if reader is None else parts.READERS[reader](batches)

    def loss(self, batch: Any) -> Tensor:
        kill_point("batch")
        x, y, idx, weight = parts.unpack(batch)
        out, seen = self.model(x, idx)
        kill_point("forward")
        loss = parts.sample_loss(self.p, out, y, seen, weight)
        return loss if self.scaler is None else parts.overflow(loss, idx, self.scaler)

    def update(self, loss: Tensor, *, clip: bool = False) -> None:
        """The rest of a step."""
        scaler = self.scaler
        (loss if scaler is None else scaler.scale(loss)).backward()
        kill_point("backward")
        if clip:
            if scaler is not None:
                scaler.unscale_(self.optimizer)
            self.model.clip_grad_norm_(MAX_NORM, policy="fixed")
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()
        kill_point("stepped")
        self.optimizer.zero_grad()
        if self.model.stepped:
            self.ema.update(self.net)

    def final_state(self) -> dict[str, Any]:
        # What a step on two loaders counts as is another matter.
        counts = self.options["shape"] not in ("zipped", "filtered", "skipping")
        return parts.final_state(
            self.net,
            self.optimizer,
            None,
            self.scaler,
            self.ema,
            self.history,
            self.clock.steps,
            self.clock.samples if counts else 0,
        )


class Elastic(Kit):
    """What a user of resilin has."""

    def wrap(self) -> None:
        rule = self.p.rule
        self.model = resilin.AdaptiveDataParallel(
            self.module, self.optimizer, rule=rule, scaler=self.scaler
        )
        resilin.register("ema", self.ema)
        resilin.register("history", self.history)

    @property
    def clock(self) -> Any:
        return self.model.clock

    def loader(self, data: Any, batch_size: int, **settings: Any) -> Any:
        get = self.options.get
        settings = {
            "num_workers": get("workers", 0),
            "drop_last": get("drop_last", False),
            **settings,
        }
        return resilin.AdaptiveDataLoader(
            data,
            batch_size,
            shuffle=self.p.shuffle,
            max_local_bsz=get("max_local_bsz"),
            **settings,
        )

    def epochs(self) -> Iterable[int]:
        return resilin.remaining_epochs_until(self.p.epochs)


# Plain PyTorch ---------------------------------------------------------------------------------


class PlainModel:
    """A module, and the few names of resilin that loops use besides it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.indices = torch.tensor([])
        """Samples of the last call that trains."""
        self.stepped = False

    def __call__(self, *args: Any) -> Any:
        if self.module.training and torch.is_grad_enabled():
            told = [each["idx"] for each in args[0]] if len(args) == 1 else args[1]
            self.indices, self.stepped = torch.as_tensor(told), False
        return self.module(*args)

    forward = __call__

    def train(self) -> None:
        self.module.train()

    def eval(self) -> None:
        self.module.eval()

    def clip_grad_norm_(self, norm: float, policy: str) -> None:
        nn.utils.clip_grad_norm_(self.module.parameters(), norm)


class PlainLoader:
    """The global batches of resilin's order of samples."""

    def __init__(self, kit: Plain, data: Any, batch_size: int, **settings: Any) -> None:
        self.kit, self.data, self.batch_size = kit, data, batch_size
        self.collate = settings.get("collate_fn", default_collate)
        self.drop_last = settings.get("drop_last", kit.options.get("drop_last", False))
        self.size: Callable[[Any], int] = lambda clock: batch_size
        self.passes = 0

    def set_batch_size(self, size: Callable[[Any], int]) -> None:
        self.size = size

    def __len__(self) -> int:
        return -(-len(self.data) // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        num = len(self.data)
        stream = SampleStream(num, shuffle=self.kit.p.shuffle)
        position, end = num * self.passes, num * (self.passes + 1)
        self.passes += 1
        while position < end:
            size = self.size(SimpleNamespace(steps=self.kit.num_read))
            span = range(position, min(position + size, end))
            scale = size / self.batch_size
            if len(span) < size:
                if self.drop_last:
                    return
                scale = min(scale, math.ceil(len(span) / self.batch_size))
            samples = [self.data[int(index)] for index in stream.indices(span)]
            for sample in samples:
                if sample is not None:
                    self.kit.scales[int(sample[2])] = scale
            position = span.stop
            self.kit.num_read += 1
            yield self.collate(samples)


class Plain(Kit):
    """Stock PyTorch: one process, one batch per step."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.num_read = 0
        self.scales: dict[int, float] = {}
        """What the batch that a sample was read with is, in reference batches."""
        self.clock = SimpleNamespace(steps=0, samples=0)

    def wrap(self) -> None:
        self.model = PlainModel(self.module)
        self.trajectory = [self._parameters()]
        """Parameters after each number of steps."""
        self.optimizer.register_step_pre_hook(self._before)
        self.optimizer.register_step_post_hook(self._after)

    def _parameters(self) -> dict[str, Tensor]:
        return {name: q.detach().clone() for name, q in self.net.named_parameters()}

    def _before(self, *_: Any) -> None:
        self._lrs = [group["lr"] for group in self.optimizer.param_groups]
        scale = self.scales[int(self.model.indices[0])] if self.p.rule == "linear" else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] *= scale

    def _after(self, *_: Any) -> None:
        for group, lr in zip(self.optimizer.param_groups, self._lrs, strict=True):
            group["lr"] = lr
        self.clock.steps += 1
        self.clock.samples += len(self.model.indices)
        self.model.stepped = True
        self.trajectory.append(self._parameters())

    def loader(self, data: Any, batch_size: int, **settings: Any) -> Any:
        return PlainLoader(self, data, batch_size, **settings)

    def epochs(self) -> Iterable[int]:
        return range(self.p.epochs)


# Loops -----------------------------------------------------------------------------------------


def passes(kit: Kit) -> None:
    loader = kit.main_loader()
    for _ in kit.epochs():
        kill_point("epoch")
        for batch in kit.read(loader):
            kit.update(kit.loss(batch))
        kill_point("epoch_end")


def endless(kit: Kit) -> None:
    """A number of steps, whatever the epochs are."""
    loader, how = kit.main_loader(), kit.options["how"]
    if how == "while":
        while True:
            kill_point("epoch")
            for batch in loader:
                kit.update(kit.loss(batch))
                if kit.clock.steps >= kit.total:
                    return
    batches = {"next": _again, "chain": _chained, "cycle": itertools.cycle}[how](loader)
    while kit.clock.steps < kit.total:
        kit.update(kit.loss(next(batches)))


def _again(loader: Any) -> Iterator[Any]:
    batches = iter(loader)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            batches = iter(loader)
            batch = next(batches)
        yield batch


def _chained(loader: Any) -> Iterator[Any]:
    return itertools.chain.from_iterable(itertools.repeat(loader))


def zipped(kit: Kit) -> None:
    """Two loaders with as many batches each."""
    how, p, num = kit.options["how"], kit.p, kit.p.num_samples // 3
    first, second = Rows(kit.data), Rows(kit.data, num)
    if how == "labels":
        second = Rows(kit.data)
    else:
        first.num = num
        second.num = num * kit.options["other"]
    other_size = p.batch_size * (len(second) // len(first))
    a = kit.loader(first, p.batch_size, fingerprint="a")
    b = kit.loader(second, other_size, fingerprint="b")
    for _ in kit.epochs():
        kill_point("epoch")
        for one, other in kit.read(zip(a, b, strict=False)):
            if how == "turns":
                kit.update(kit.loss(one))
                kit.update(kit.loss(other))
            elif how == "calls":
                kit.update((kit.loss(one) + kit.loss(other)) / 2)
            elif how == "cat":
                kit.update(kit.loss([torch.cat(each) for each in zip(one, other, strict=True)]))
            else:
                x, _, idx, weight = one
                kit.update(kit.loss((x, other[1], idx, weight)))
        kill_point("epoch_end")


def skipping(kit: Kit) -> None:
    """Some steps of each epoch are left out; all replicas see which."""
    loader = kit.main_loader()
    for epoch in kit.epochs():
        kill_point("epoch")
        for batch in kit.read(loader):
            if (int(batch[2][0]) // kit.p.batch_size + epoch) % 3 == 0:
                continue
            kit.update(kit.loss(batch))
        kill_point("epoch_end")


def filtered(kit: Kit) -> None:
    """Samples that cannot be read are left out when a batch is put together."""
    settings = {"batch_weight": lambda batch: len(batch[0])} if kit.options["weighed"] else {}
    data = Rows(kit.data, broken=True)
    loader = kit.main_loader(data, collate_fn=without_broken, **settings)
    for _ in kit.epochs():
        kill_point("epoch")
        for batch in kit.read(loader):
            kit.update(kit.loss(batch))
        kill_point("epoch_end")


def without_broken(samples: list[Any]) -> Any:
    return default_collate([sample for sample in samples if sample is not None])


def changing(kit: Kit) -> None:
    """The data are others in each epoch."""
    data = Rows(kit.data)
    grows = kit.options["how"] == "grow"
    loader = kit.main_loader(data)
    for epoch in kit.epochs():
        kill_point("epoch")
        if grows:
            data.num = kit.p.num_samples - 2 * (kit.p.epochs - 1 - epoch)
        else:
            data.strength = 1 + epoch / 2
        for batch in kit.read(loader):
            kit.update(kit.loss(batch))
        kill_point("epoch_end")


def hooked(kit: Kit) -> None:
    """Hooks change the gradient; see `_hook`."""
    passes(kit)


def _hook(kit: Kit) -> None:
    how = kit.options["how"]

    def clamp(parameter: Tensor) -> None:
        parameter.grad.clamp_(-CLAMP, CLAMP)

    def step(parameter: Tensor) -> None:
        kit.changed[parameter] = parameter.detach().clone()
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    for parameter in kit.net.first.parameters():
        if how == "scale":
            parameter.register_hook(lambda grad: grad / 2)
        elif how == "clamp":
            parameter.register_hook(lambda grad: grad.clamp(-CLAMP, CLAMP))
        else:
            parameter.register_post_accumulate_grad_hook(clamp if how == "accumulated" else step)


def left(kit: Kit) -> None:
    """The loop is left once, and the script is run again."""
    loader, how = kit.main_loader(), kit.options["how"]
    leaves = isinstance(kit, Elastic) and hooks.may_leave()
    for _ in kit.epochs():
        kill_point("epoch")
        leave = False
        for batch in kit.read(loader):
            kit.update(kit.loss(batch))
            leave = leaves and kit.clock.steps >= kit.options["after"]
            if leave:
                hooks.leave()
                if how == "exit":
                    sys.exit(0)
                if how == "return":
                    return
                break
        kill_point("epoch_end")
        if leave:
            break


def timm(kit: Kit) -> None:
    """A prefetcher, a scaler that is called, updates that are counted."""
    frequency, updates = kit.options["update_freq"], 0
    loader = Prefetcher(kit.main_loader(), normalise=kit.options["normalise"])
    for epoch in kit.epochs():
        kill_point("epoch")
        for number, batch in enumerate(loader):
            loss = kit.loss(batch)
            if (number + 1) % frequency == 0:
                kit.update(loss / frequency, clip=True)
                updates = kit.clock.steps
                for group in kit.optimizer.param_groups:
                    group["lr"] = group.setdefault("base", group["lr"]) * 0.97**updates
            else:
                scaled = loss if kit.scaler is None else kit.scaler.scale(loss)
                (scaled / frequency).backward()
        kit.history.append(epoch)
        kill_point("epoch_end")


class Prefetcher:
    """Copies, and may normalise, the batch after the one that it gives."""

    def __init__(self, loader: Any, *, normalise: bool) -> None:
        self.loader, self.normalise = loader, normalise

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        before: Any = None
        for batch in self.loader:
            on_device = [part.clone() for part in parts.unpack(batch)]
            if self.normalise:
                on_device[0].sub_(0.5).div_(2)
            if before is not None:
                yield before
            before = on_device
        if before is not None:
            yield before


def nanogpt(kit: Kit) -> None:
    """The next batch is fetched while the model computes on this one; evaluations between."""
    loader = kit.main_loader()
    if not kit.options["endless"]:
        for _ in kit.epochs():
            kill_point("epoch")
            batches = iter(loader)
            _iterate(kit, lambda batches=batches: next(batches, None))
            kill_point("epoch_end")
        return
    batches = _again(loader)
    _iterate(kit, lambda: next(batches))


def _iterate(kit: Kit, get_batch: Callable[[], Any]) -> None:
    endless = kit.options["endless"]
    batch = get_batch()
    while batch is not None and not (endless and kit.clock.steps >= kit.total):
        for group in kit.optimizer.param_groups:
            group["lr"] = group.setdefault("base", group["lr"]) * 0.97**kit.clock.steps
        if kit.clock.steps % 3 == 0:
            kit.model.eval()
            with torch.no_grad():
                kit.model(*parts.test_data(kit.p).tensors[::2][:2])
            kit.model.train()
        loss = kit.loss(batch)
        batch = get_batch()
        kit.update(loss, clip=True)


def lerobot(kit: Kit) -> None:
    """Batches are dicts of an endless generator; `forward` is called by name."""
    batches = _cycle(kit.main_loader(collate_fn=parts.as_dict))
    kit.model.train()
    for _ in range(kit.clock.steps, 10 * kit.total):
        batch = next(batches)
        kill_point("batch")
        out, seen = kit.model.forward(batch["x"], batch["idx"])
        kill_point("forward")
        loss = parts.sample_loss(kit.p, out, batch["y"], seen, batch["weight"])
        kit.update(loss, clip=True)
        if kit.model.stepped:
            kit.history.append(kit.clock.steps)
        if kit.clock.steps >= kit.total:
            break


def _cycle(batches: Any) -> Iterator[Any]:
    while True:
        yield from batches


def detectron(kit: Kit) -> None:
    """A batch is a list of dicts with images of different sizes; the model returns losses."""
    batches = _chained(kit.main_loader(collate_fn=as_inputs))
    while kit.clock.steps < kit.total:
        kill_point("batch")
        losses = kit.model(next(batches))
        kill_point("forward")
        loss = sum(losses.values())
        kit.optimizer.zero_grad()
        loss.backward()
        kill_point("backward")
        kit.optimizer.step()
        kill_point("stepped")


def as_inputs(samples: list[Any]) -> list[dict[str, Tensor]]:
    return [
        {"image": x[:, None] * torch.ones(1 + int(idx) % 3), "y": y, "idx": idx}
        for x, y, idx, _ in samples
    ]


LOOPS = (
    passes,
    endless,
    zipped,
    skipping,
    filtered,
    changing,
    hooked,
    left,
    timm,
    nanogpt,
    lerobot,
    detectron,
)


# Running ---------------------------------------------------------------------------------------


def run(kit: Elastic | Plain) -> None:
    """Runs the loop of a kit."""
    if kit.options["shape"] == "hooked":
        _hook(kit)
    kit.wrap()
    if isinstance(kit, Elastic):
        every = kit.options.get("checkpoint_every")
        saves = every is not None or kit.options["shape"] == "left"
        where = hooks.folder() / "checkpoints" if saves else None
        resilin.checkpoint_to(where, every=every, memory_every=1)
        kill_point("wrapped")
    {loop.__name__: loop for loop in LOOPS}[kit.options["shape"]](kit)


def main(options: dict[str, Any]) -> None:
    """Trains, and saves the final state."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    resilin.init_process_group()
    kill_point("setup")
    kit = Elastic(options)
    try:
        run(kit)
    except (RuntimeError, ValueError):
        for parameter, value in kit.changed.items():
            parameter.data = value
        hooks.save(
            {"steps": kit.clock.steps, "parameters": kit.final_state()["parameters"]}, "refused"
        )
        raise
    kill_point("trained")
    hooks.save(kit.final_state())


def oracle(options: dict[str, Any]) -> Plain:
    """The same in plain PyTorch."""
    kit = Plain(options)
    run(kit)
    return kit
