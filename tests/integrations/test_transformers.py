"""The Trainer: exact steps at any number of processes, beside what the stock one does."""

from __future__ import annotations

import copy
import os
import sys
from collections import Counter
from pathlib import Path

import datasets
import pytest
import torch
import torch.distributed as dist

import resilin

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, default_data_collator

from resilin.core.events import StepEvent
from resilin.integrations.transformers import ElasticTrainer
from tests import forked
from tests.integrations.parts import (
    LR,
    SAMPLES,
    Numbers,
    alone,
    everywhere,
    forget,
    is_first,
    whole_steps,
)
from tests.integrations.trainers import StopAt, arguments, make

PRELOAD = ("datasets", "transformers.trainer", "resilin.integrations.transformers")
ONCE = Counter(range(SAMPLES))


class Accumulate(TrainerCallback):
    """Changes the stock Trainer's accumulation from 1 to 4 behind step 3."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            args.gradient_accumulation_steps = 4


@pytest.mark.world_size(2)
def test_accumulation_may_change_in_the_middle_of_an_epoch(tmp_path):
    # 4 samples per process and micro-batch: 8 in a step, and then 4 micro-batches for 32.
    trainer, watch = make(tmp_path, batch_size=8, num_train_epochs=1)
    trainer.set_batch_size(resilin.BatchTrace.parse("step,batchsize\n0,8\n3,32\n"))
    trainer.train()
    steps = whole_steps(watch.steps)
    assert [len(step) for step in steps] == [8, 8, 8, 32, 32, 8]
    assert watch.weights == [1.0] * 6
    a, b = everywhere(watch.ws)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert Counter(sample for step in steps for sample in step) == ONCE

    # The stock Trainer, told to do the same: the first update after the change has a quarter of the
    # weight, the next one has too little, and the replicas part. If this fails, upstream is mended.
    stock, watch = make(tmp_path, elastic=False, num_train_epochs=1, callbacks=(Accumulate(),))
    stock.train()
    assert watch.weights[:3] == [1.0] * 3
    assert watch.weights[3] == 0.25
    a, b = everywhere(watch.ws)
    assert not torch.equal(a[4], b[4])


@pytest.mark.nightly(part="frameworks")
@pytest.mark.world_size(2, init=False)
def test_a_run_goes_on_at_another_number_of_processes_in_the_middle_of_an_epoch(shared_path):
    trace = resilin.BatchTrace.parse("step,batchsize\n0,16\n2,24\n4,7\n9,16\n")
    common = {"lr_scheduler_type": "linear", "save_strategy": "steps", "save_steps": 3}

    def run(name, start=None, stop=None, sizes=trace):
        callbacks = (StopAt(stop),) if stop else ()
        trainer, watch = make(shared_path / name, callbacks=callbacks, **common)
        trainer.set_batch_size(sizes)
        trainer.train(resume_from_checkpoint=start and str(shared_path / start))
        return trainer, watch

    if is_first():
        with alone():
            _, whole = run("reference", sizes=16)
            assert whole.lrs == pytest.approx([LR * (1 - step / 12) for step in range(12)])
            trainer, one = run("one", stop=6)
            assert [len(step) for step in one.steps] == [16, 16, 24, 24, 7, 7]
    resilin.init_process_group()
    forget()
    trainer, two = run("two", start="one/checkpoint-6", stop=12)
    assert trainer.state.global_step == 12
    two_steps = whole_steps(two.steps)
    a, b = everywhere(two.ws)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    settings = {"elastic": False, "save_strategy": "steps", "save_steps": 3, "num_train_epochs": 1}
    stock, stock_two = make(shared_path / "stock", callbacks=(StopAt(3),), **settings)
    stock.train()
    stock_steps = whole_steps(stock_two.steps)
    dist.barrier()
    dist.destroy_process_group()
    if not is_first():
        return
    with alone():
        trainer, last = run("last", start="two/checkpoint-12")
        stock, stock_one = make(shared_path / "stock", **settings)
        stock.train(resume_from_checkpoint=str(shared_path / "stock" / "checkpoint-3"))
    steps = [*one.steps, *two_steps, *last.steps]
    assert [len(step) for step in steps[:9]] == [16, 16, 24, 24, 7, 7, 2, 7, 7]
    # Nothing repeated, nothing missing: in each of the two epochs, each sample was used once.
    order = [sample for step in steps for sample in step]
    assert Counter(order[:SAMPLES]) == ONCE
    assert Counter(order[SAMPLES:]) == ONCE
    # The learning rate is that of the reference run at as many samples.
    samples = 0
    for lr, step in zip([*one.lrs, *two.lrs, *last.lrs], steps, strict=True):
        assert lr == whole.lrs[samples // 16]
        samples += len(step)
    assert trainer.state.epoch == 2.0
    assert trainer.state.global_step == trainer.state.max_steps
    assert len(last.lrs) + 12 == trainer.state.global_step

    # The stock Trainer skips as many batches of one process as there were steps of two: half of
    # what is done is done again. If this fails, upstream is mended.
    done = [sample for step in [*stock_steps, *stock_one.steps] for sample in step]
    assert (Counter(done) - ONCE).total() == 12


@pytest.mark.nightly(part="frameworks")
@pytest.mark.world_size(2)
def test_every_way_to_choose_the_batch_size_keeps_the_data_and_the_replicas_whole(tmp_path):
    def by_schedule(trainer):
        trainer.set_batch_size(resilin.Schedule(lambda steps: 16 if steps < 2 else 31))

    def by_clock(trainer):
        trainer.set_batch_size(lambda clock: 16 + clock.steps)

    def by_autoscaling(trainer):
        trainer.autoscale_batch_size(64)

    for choose in (by_schedule, by_clock, by_autoscaling):
        trainer, watch = make(tmp_path)
        choose(trainer)
        trainer.train()
        steps = whole_steps(watch.steps)
        order = [sample for step in steps for sample in step]
        assert Counter(order[:SAMPLES]) == ONCE
        assert Counter(order[SAMPLES:]) == ONCE
        assert watch.weights == pytest.approx([1.0] * len(watch.weights), abs=1e-4)
        a, b = everywhere(watch.ws)
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        assert trainer.model.largest == 4
        # What the Trainer says about the run: optimizer steps, and epochs of the data.
        assert trainer.state.global_step == trainer.state.max_steps == len(watch.steps)
        assert trainer.state.epoch == 2.0
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == len(watch.steps)
    assert [log["resilin/batch_size"] for log in logs] == [len(step) for step in steps]
    assert logs[-1]["resilin/noise_scale"] > 0
    assert logs[-1]["resilin/progress"] > 0


def sentences():
    """Of unequal length: the mean over tokens is not the mean over sentences."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 16, (7, 9), generator=generator)
    labels = ids.clone()
    for row, length in enumerate((9, 2, 7, 3, 9, 4, 5)):
        labels[row, length:] = -100
    return [{"input_ids": a, "labels": b} for a, b in zip(ids, labels, strict=True)]


@pytest.mark.world_size(2)
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
def test_the_gradient_is_the_mean_over_the_tokens_of_the_global_batch(tmp_path):
    dataset, whole = sentences(), default_data_collator(sentences())
    tokens = int(whole["labels"][:, 1:].ne(-100).sum())
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=16, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    for smoothing in (0.0, 0.1):
        torch.manual_seed(0)
        resilin.reset_job()
        model = LlamaForCausalLM(config)
        plain = copy.deepcopy(model).train()
        args = arguments(
            tmp_path,
            max_steps=1,
            per_device_train_batch_size=2,
            label_smoothing_factor=smoothing,
            ddp_find_unused_parameters=None,
        )
        trainer = ElasticTrainer(model, args, train_dataset=dataset, batch_size=7, rule="constant")
        # One process with the whole batch, as the stock Trainer would have it.
        args.average_tokens_across_devices = False
        loss = trainer.compute_loss(plain, dict(whole), num_items_in_batch=tokens)
        args.average_tokens_across_devices = True
        loss.backward()
        trainer.train()
        assert resilin.current_job().clock.tokens == tokens == 32
        for before, after in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(after, before - LR * before.grad, atol=1e-6, rtol=1e-5)
        assert trainer.state.log_history[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)


REFUSED = {
    "gradient_accumulation_steps": 4,
    "auto_find_batch_size": True,
    "average_tokens_across_devices": False,
    "ignore_data_skip": True,
    "include_num_input_tokens_seen": "all",
    "train_sampling_strategy": "group_by_length",
    "dataloader_in_order": False,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_arguments_say_and_cannot_be_honoured_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=rf"{name} \('?{REFUSED[name]}'?\) must be"):
        make(tmp_path, **{name: REFUSED[name]})


def test_a_checkpoint_of_a_stock_trainer_does_not_tell_which_samples_are_done(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 3, "max_steps": 3}
    make(tmp_path, elastic=False, **settings)[0].train()
    trainer, _ = make(tmp_path, **settings)
    with pytest.raises(ValueError, match=r"checkpoint-3 has no resilin\.json"):
        trainer.train(resume_from_checkpoint=True)


def test_of_two_states_the_newer_one_counts(tmp_path):
    def run(name, stop=None, start=None):
        callbacks = (StopAt(stop),) if stop else ()
        settings = {"save_strategy": "steps", "save_steps": 3, "num_train_epochs": 1}
        trainer, watch = make(tmp_path, callbacks=callbacks, **settings)
        resilin.checkpoint_to(tmp_path / name, memory_every=None)
        trainer.train(resume_from_checkpoint=start)
        return trainer, watch

    # The job keeps its last state in a place of its own, apart from the Trainer's checkpoints.
    _, first = run("older", stop=2)
    _, both = run("newer", stop=4)
    assert both.steps[:2] == first.steps
    checkpoint = str(tmp_path / "checkpoint-3")
    # An epoch is six equal steps, whose gradients are means of the data.
    end = (-LR * 6 * Numbers().x.mean(0)).tolist()
    # What a callback has noted survives with the job, and is not in the Trainer's checkpoints.
    for name, done in (("newer", []), ("older", both.steps[:3])):
        trainer, rest = run(name, start=checkpoint)
        assert Counter(i for step in [*done, *rest.steps] for i in step) == ONCE
        assert trainer.state.global_step == 6
        assert trainer.model.w.tolist() == pytest.approx(end, abs=1e-4)


def test_max_steps_are_those_of_the_reference_run(tmp_path):
    trainer, watch = make(tmp_path, max_steps=9, lr_scheduler_type="linear")
    trainer.set_batch_size(32)
    trainer.train()
    # Six of 16 samples are an epoch: three of 32, and two more of 32 for the other three.
    assert trainer.state.global_step == trainer.state.max_steps == 5
    # A step of 32 makes two of the reference run, and is the guess of all that are left.
    assert watch.ends == [5, 5, 5, 5, 5]
    logged = [log["learning_rate"] for log in trainer.state.log_history if "loss" in log]
    assert logged == watch.lrs
    assert watch.lrs == pytest.approx([LR * (1 - step / 9) for step in (0, 2, 4, 6, 8)])


def test_with_an_adaptive_rule_progress_ends_the_run(tmp_path):
    trainer, watch = make(tmp_path, rule="adascale", num_train_epochs=2, stats_every=1)
    trainer.set_batch_size(48)
    trainer.train()
    clock = resilin.current_job().clock
    assert 12 <= clock.progress < 12 + 3
    assert trainer.state.global_step == trainer.state.max_steps == clock.steps
    assert trainer.state.epoch >= 2
    assert sum(map(len, watch.steps)) == clock.samples


def test_clipping_is_of_the_whole_step(tmp_path):
    trainer, watch = make(tmp_path, max_steps=1, max_grad_norm=0.25)
    trainer.train()
    assert torch.linalg.vector_norm(watch.ws[1]).item() == pytest.approx(0.25 * LR, rel=1e-4)
    # Before clipping, as the stock Trainer says it.
    assert trainer.state.log_history[0]["grad_norm"] > 1


@pytest.mark.nightly(part="frameworks")
def test_a_trainer_may_train_again_with_a_new_job(tmp_path):
    trainer, watch = make(tmp_path, num_train_epochs=1)
    trainer.train()
    with pytest.raises(
        ValueError, match=r"call release\(\) on the first one, or resilin\.reset_job"
    ):
        trainer.train()
    resilin.reset_job()
    trainer.train()
    assert trainer.state.global_step == 6
    assert watch.weights == pytest.approx([1.0] * 12, abs=1e-4)


@pytest.mark.nightly(part="frameworks")
def test_mixed_precision_and_evaluation_are_those_of_the_trainer(tmp_path, every_step_told):
    told = []
    trainer, watch = make(tmp_path, bf16=True, num_train_epochs=1, eval_strategy="epoch")
    trainer.can_return_loss = True
    resilin.listen(told.append)
    trainer.train()
    assert len(watch.steps) == 6
    assert any("eval_loss" in log for log in trainer.state.log_history)
    assert any("eval_loss" in event.metrics for event in told if isinstance(event, StepEvent))


@pytest.mark.processes
def test_a_killed_worker_does_not_end_the_trainer():
    example = Path(__file__).parents[2] / "examples" / "huggingface_digits.py"
    command = [sys.executable, "-m", "resilin.cli", "run", "--warm", "--nproc", "2", str(example)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = forked.run(
        [*command, "--kill-at", "30"], capture_output=True, text=True, timeout=240, env=env
    )
    assert done.returncode == 0, done.stderr
    # The worker died in a callback of step 30, before its own part of that step (losses since the
    # last log, random numbers) was kept: the step is made again.
    assert "at step 29 from memory" in done.stderr
    assert float(done.stdout.split()[-1]) > 0.88


@pytest.mark.nightly(part="frameworks")
def test_the_progress_bar_ends_where_the_run_does(tmp_path):
    trainer, _ = make(tmp_path, num_train_epochs=1, disable_tqdm=False)
    bar = next(c for c in trainer.callback_handler.callbacks if hasattr(c, "training_bar"))
    seen = []
    trainer.set_batch_size(lambda clock: 16 if clock.steps < 2 else 32)
    trainer.add_callback(Totals(seen, bar))
    trainer.train()
    assert seen == [6, 6, 4, 4]


class Totals(TrainerCallback):
    def __init__(self, seen, bar):
        self.seen, self.bar = seen, bar

    def on_step_end(self, args, state, control, **kwargs):
        self.seen.append(self.bar.training_bar.total)


def test_a_stream_is_refused(tmp_path):
    trainer, _ = make(tmp_path, max_steps=3)
    rows = datasets.Dataset.from_dict({"x": [[1.0]] * 8}).to_iterable_dataset(num_shards=2)
    trainer.train_dataset = rows
    with pytest.raises(ValueError, match=r"the Trainer counts the steps of an epoch"):
        trainer.train()
