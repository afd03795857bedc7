"""Accelerate: the loop stays, the step becomes exact, beside what the stock loop does."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import DataLoader

import resilin

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs

from resilin.integrations.accelerate import prepare, read_out
from tests.integrations.parts import (
    LR,
    SAMPLES,
    Mean,
    Numbers,
    alone,
    everywhere,
    forget,
    is_first,
    whole_steps,
)

PRELOAD = ("resilin.integrations.accelerate",)
ONCE = Counter(range(SAMPLES))
TOTAL = SAMPLES // 8
TRACE = "step,batchsize\n0,8\n3,32\n5,7\n"


def linear(optimizer):
    return LambdaLR(optimizer, lambda step: 1 - step / TOTAL)


class Loop:
    """A training loop as Accelerate's own guide has it."""

    def __init__(self, *, elastic=True, batch_size=8, schedule=linear, **settings):
        resilin.reset_job()
        self.accelerator = Accelerator(cpu=True, **settings)
        self.bare = Mean()
        optimizer = torch.optim.SGD(self.bare.parameters(), lr=LR)
        scheduler = schedule(optimizer)
        if elastic:
            loader = resilin.AdaptiveDataLoader(
                Numbers(), batch_size, max_local_bsz=4, shuffle=True
            )
            parts = prepare(
                self.accelerator, self.bare, optimizer, loader, scheduler, rule="constant"
            )
        else:
            loader = DataLoader(Numbers(), batch_size=batch_size, shuffle=True)
            parts = self.accelerator.prepare(self.bare, optimizer, loader, scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = parts
        self.steps, self.lrs, self.ws, self.norms = [], [], [self.w], []

    @property
    def w(self):
        return self.bare.w.detach().clone()

    @property
    def weights(self):
        pairs = zip(self.ws, self.ws[1:], self.lrs, strict=False)
        return [round(((a - b)[0] / lr).item(), 4) for a, b, lr in pairs]

    def epoch(self, stop=None, behind=None):
        for batch in self.loader:
            with self.accelerator.accumulate(self.model):
                lr = self.optimizer.param_groups[0]["lr"]
                self.accelerator.backward(self.model(**batch)["loss"])
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 1e6)
                    self.norms.append(float(norm))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            if self.accelerator.sync_gradients:
                self.lrs.append(lr)
                self.ws.append(self.w)
                self.steps.append(self.bare.ids)
                self.bare.ids = []
                if behind is not None:
                    behind(self)
                if len(self.steps) == stop:
                    return


@pytest.mark.world_size(2)
def test_accumulation_may_change_in_the_middle_of_an_epoch():
    loop = Loop()
    loop.loader.set_batch_size(resilin.BatchTrace.parse(TRACE))
    loop.epoch()
    steps = whole_steps(loop.steps)
    sizes = [len(step) for step in steps]
    assert sizes == [8, 8, 8, 32, 32, 7, 1]
    assert loop.weights == [1.0] * 7
    a, b = everywhere(loop.ws)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert Counter(sample for step in steps for sample in step) == ONCE
    # The schedule is that of the reference run at as many samples.
    begins = [sum(sizes[:step]) for step in range(7)]
    assert loop.lrs == pytest.approx([LR * (1 - begin // 8 / TOTAL) for begin in begins])
    read = read_out()
    assert read["resilin/replicas"] == 2
    assert read["resilin/samples"] == SAMPLES
    assert read["resilin/gain"] == pytest.approx(7 / 8)
    assert loop.accelerator.unwrap_model(loop.model) is loop.bare

    # The stock loop, told to do the same. If this fails, upstream is mended.
    def accumulate(loop):
        if len(loop.steps) == 3:
            loop.accelerator.gradient_accumulation_steps = 4

    loop = Loop(elastic=False, batch_size=4)
    loop.epoch(behind=accumulate)
    # A quarter of the gradient's weight, and a schedule that goes twice as fast with two processes.
    assert loop.weights[:4] == [1.0, 1.0, 1.0, 0.25]
    assert loop.lrs[:3] == pytest.approx([LR, LR * (1 - 2 / TOTAL), LR * (1 - 4 / TOTAL)])


@pytest.mark.world_size(2, init=False)
def test_a_saved_state_goes_on_at_another_number_of_processes(shared_path):
    def run(start, stop, save):
        loop = Loop()
        loop.loader.set_batch_size(resilin.BatchTrace.parse("step,batchsize\n0,8\n2,16\n4,7\n"))
        if start is not None:
            loop.accelerator.load_state(str(shared_path / start))
        for _ in resilin.remaining_epochs_until(2):
            loop.epoch(stop)
            if len(loop.steps) == stop:
                break
        loop.accelerator.save_state(str(shared_path / save))
        return loop

    if is_first():
        with alone():
            one = run(None, 3, "one")
    resilin.init_process_group()
    forget()
    two = run("one", 4, "two")
    two_steps = whole_steps(two.steps)
    a, b = everywhere(two.ws)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    dist.destroy_process_group()
    if not is_first():
        return
    with alone():
        last = run("two", None, "last")
    steps = [*one.steps, *two_steps, *last.steps]
    assert [len(step) for step in steps[:7]] == [8, 8, 16, 16, 7, 7, 7]
    order = [sample for step in steps for sample in step]
    assert Counter(order[:SAMPLES]) == ONCE
    assert Counter(order[SAMPLES:]) == ONCE
    begins = [sum(map(len, steps[:step])) for step in range(len(steps))]
    lrs = [*one.lrs, *two.lrs, *last.lrs]
    assert lrs == pytest.approx([LR * (1 - begin // 8 / TOTAL) for begin in begins])


def test_what_the_accelerator_is_told_and_cannot_be_honoured_is_refused():
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps \(4\) must be 1"):
        Loop(gradient_accumulation_steps=4)
    forget()
    with pytest.raises(ValueError, match=r"step_scheduler_with_optimizer \(False\).*'rule'"):
        Loop(step_scheduler_with_optimizer=False)
    forget()
    hook = DistributedDataParallelKwargs(comm_hook="fp16")
    with pytest.raises(ValueError, match=r"comm_hook \(fp16\)"):
        Loop(kwargs_handlers=[hook])
    forget()
    accelerator = Accelerator(cpu=True)
    model = Mean()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with pytest.raises(ValueError, match="exactly one AdaptiveDataLoader, and was given 0"):
        prepare(accelerator, model, optimizer, DataLoader(Numbers()))
    wrapped = nn.DataParallel(model)
    with pytest.raises(ValueError, match="the model is a DataParallel already"):
        prepare(accelerator, wrapped, optimizer, resilin.AdaptiveDataLoader(Numbers(), 8))


@pytest.mark.world_size(1)
def test_a_sharded_model_is_refused():
    resilin.reset_job()
    accelerator, model = Accelerator(cpu=True), Mean()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with pytest.raises(ValueError, match=r"1 parameters are sharded \(\w+ is a DTensor\)"):
        prepare(accelerator, model, optimizer, resilin.AdaptiveDataLoader(Numbers(), 8))


def test_what_a_loop_does_to_resume_by_hand_is_refused(tmp_path):
    loop = Loop()
    with pytest.raises(ValueError, match=r"num_batches \(3\) must be 0"):
        loop.accelerator.skip_first_batches(loop.loader, 3)
    (tmp_path / "stock").mkdir()
    with pytest.raises(ValueError, match=r"has no resilin\.json"):
        loop.accelerator.load_state(str(tmp_path / "stock"))


def test_a_state_of_the_job_that_is_older_than_the_loaded_one_does_not_count(tmp_path):
    def run(name, stop=None, start=None):
        loop = Loop()
        resilin.checkpoint_to(tmp_path / name, every=1, memory_every=None)
        if start is not None:
            loop.accelerator.load_state(str(tmp_path / start))
        for _ in resilin.remaining_epochs_until(1):
            loop.epoch(stop)
            if stop:
                break
        return loop

    run("own", stop=2)
    first = run("elsewhere", stop=4)
    first.accelerator.save_state(str(tmp_path / "four"))
    rest = run("own", start="four")
    assert Counter(i for loop in (first, rest) for step in loop.steps for i in step) == ONCE
    assert resilin.current_job().clock.steps == 12


def test_a_scheduler_of_epochs_is_stepped_by_the_loop():
    loop = Loop(schedule=lambda optimizer: StepLR(optimizer, 1))
    loop.epoch()
    with pytest.raises(RuntimeError, match="schedule_by='user'"):
        loop.scheduler.step()
    resilin.reset_job()
    model = Mean()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    loader = resilin.AdaptiveDataLoader(Numbers(), 8)
    parts = prepare(
        Accelerator(cpu=True), model, optimizer, loader, StepLR(optimizer, 1), schedule_by="user"
    )
    for batch in parts[2]:
        parts[0](**batch)["loss"].backward()
        parts[1].step()
        parts[1].zero_grad()
    parts[3].step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(LR / 10)


def test_clipping_is_of_the_whole_step_also_without_asking_for_it():
    loop = Loop(batch_size=16)
    for batch in loop.loader:
        loop.accelerator.backward(loop.model(**batch)["loss"])
        norm = loop.accelerator.clip_grad_norm_(loop.model.parameters(), 0.5)
        assert (norm is None) == (not loop.accelerator.sync_gradients)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        if norm is not None:
            break
    assert torch.linalg.vector_norm(loop.bare.w).item() == pytest.approx(0.5 * LR, rel=1e-4)


def test_loaders_for_evaluation_are_those_of_accelerate():
    accelerator = Accelerator(cpu=True)
    model = Mean()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    train = resilin.AdaptiveDataLoader(Numbers(), 8)
    held_out = DataLoader(Numbers(10), batch_size=4)
    model, optimizer, train, held_out = prepare(accelerator, model, optimizer, train, held_out)
    model.eval()
    gathered = [accelerator.gather_for_metrics(batch["ids"]) for batch in held_out]
    assert torch.cat(gathered).tolist() == list(range(10))


def test_a_scaled_loss_weighs_as_much_and_an_overflow_is_no_step():
    # Accelerate has a scaler on GPUs only; its optimizer takes any.
    resilin.reset_job()
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    model = Mean()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    loader = resilin.AdaptiveDataLoader(Numbers(), 16, max_local_bsz=4)
    wrapped, optimizer, loader = prepare(accelerator, model, optimizer, loader, rule="constant")
    ends = 0
    for batch in loader:
        loss = wrapped(**batch)["loss"]
        ends += accelerator.sync_gradients
        overflows = accelerator.sync_gradients and ends == 3
        accelerator.backward(loss * (float("inf") if overflows else 1.0))
        optimizer.step()
        optimizer.zero_grad()
    assert accelerator.scaler.get_scale() == 2.0**9
    assert resilin.current_job().clock.steps == 5
    assert model.w[0].item() == pytest.approx(-5 * LR)


class Remembers:
    def __init__(self):
        self.tensor = torch.zeros(3)

    def state_dict(self):
        return {"tensor": self.tensor}

    def load_state_dict(self, state):
        self.tensor = state["tensor"]


def test_what_the_user_registers_is_in_the_folder_too(tmp_path):
    loop, thing = Loop(), Remembers()
    resilin.register("mine", thing)
    loop.epoch(stop=2)
    thing.tensor = torch.arange(3.0)
    loop.accelerator.save_state(str(tmp_path))
    thing.tensor = torch.zeros(3)
    loop.accelerator.load_state(str(tmp_path))
    assert thing.tensor.tolist() == [0, 1, 2]


def test_without_the_packages_one_sentence_says_what_to_install():
    code = (
        "import sys; sys.modules['accelerate'] = sys.modules['transformers'] = None\n"
        "import resilin; resilin.AdaptiveDataLoader\n"
        "import resilin.integrations.transformers"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "needs accelerate: pip install 'resilin[hf]'" in done.stderr.splitlines()[-1]
