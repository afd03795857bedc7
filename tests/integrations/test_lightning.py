"""Lightning's Trainer and Fabric, elastic: exact weights, exact data, schedules in samples.

Beside each promise stands what Lightning does without resilin, as an assertion: the day it fails,
upstream has repaired the fault, and the guide has to say so.
"""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import resilin
from resilin.core.stream import SampleStream

L = pytest.importorskip("lightning")
import torchmetrics  # noqa: E402
from lightning.pytorch import callbacks  # noqa: E402
from lightning.pytorch.callbacks import (  # noqa: E402
    Checkpoint,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
)
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

from resilin.integrations.lightning import (  # noqa: E402
    Elastic,
    ElasticFabricStrategy,
    ElasticStrategy,
    JobState,
    setup,
)
from tests import forked  # noqa: E402
from tests.replicas import assert_identical, gathered  # noqa: E402
from tests.training.data.numbered import Numbered  # noqa: E402

# What Lightning says of itself, of this machine, and of small datasets.
PRELOAD = ("lightning.pytorch", "torchmetrics", "resilin.integrations.lightning")
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("lightning.fabric").setLevel(logging.ERROR)

NUM = 103
REFERENCE = 10
SIZES = (10, 7, 24, 10, 31, 5)


@pytest.fixture(autouse=True)
def tidy():
    """Lightning leaves a process group and its traces in the environment behind."""
    before, own = dict(os.environ), not dist.is_initialized()
    yield
    if own and dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


def make_data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x[:, :3].argmax(dim=1), torch.arange(NUM))


class Net(L.LightningModule):
    """Notes which samples and batch sizes it is trained on, and at which learning rates."""

    def __init__(self, interval=None, decay=lambda step: 0.97**step):
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).double()
        self.interval, self.decay = interval, decay
        self.samples, self.sizes, self.lrs, self.validated = [], [], [], []

    def training_step(self, batch, batch_idx):
        x, y, index = batch
        micro_batch = resilin.current_job().micro_batch
        if micro_batch is None or micro_batch.weight:
            self.samples += index.tolist()
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.lrs.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        micro_batch = resilin.current_job().micro_batch
        if micro_batch is not None:
            self.sizes.append(micro_batch.samples)

    def validation_step(self, batch, batch_idx):
        self.validated.append(self.global_step)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        if self.interval is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self.decay)
        return [optimizer], [{"scheduler": scheduler, "interval": self.interval}]


def make_trainer(devices=1, strategy=None, **kwargs):
    if strategy is None:
        strategy = ElasticStrategy(rule="constant", stats_every=1)
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "accelerator": "cpu",
        "num_sanity_val_steps": 0,
    }
    keeps = any(isinstance(callback, Checkpoint) for callback in kwargs.get("callbacks", ()))
    quiet["enable_checkpointing"] = keeps
    return L.Trainer(devices=devices, strategy=strategy, **{**quiet, **kwargs})


def make_loader(batch_size=lambda clock: SIZES[clock.steps % len(SIZES)], **kwargs):
    loader = resilin.AdaptiveDataLoader(
        make_data(), batch_size=REFERENCE, shuffle=True, max_local_bsz=4, **kwargs
    )
    loader.set_batch_size(batch_size)
    return loader


def train_whole(sizes, clip=None):
    """One process that trains on each whole batch, in a plain loop."""
    net, data, stream, cursor = Net(), make_data(), SampleStream(NUM, seed=0), 0
    optimizer = net.configure_optimizers()
    for size in sizes:
        span = stream.batch(cursor, size)
        assert len(span) == size
        x, y, _ = data[torch.from_numpy(stream.indices(span))]
        optimizer.zero_grad()
        F.cross_entropy(net.net(x), y).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        cursor = span.stop
    return net


def flat(net):
    return torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()])


def assert_same(net, whole, tolerance=1e-10):
    assert float((flat(net) - flat(whole)).norm() / flat(whole).norm()) < tolerance


def assert_each_once(samples, epochs=1):
    """0 samples repeated, 0 missing."""
    assert sorted(samples) == sorted([*range(NUM)] * epochs)


# Weights and schedules -----------------------------------------------------------------------


class Weigher(L.LightningModule):
    """Each sample's gradient is 1 and so is the learning rate: a step moves by its weight."""

    def __init__(self, rate):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.rate = rate
        self.weights, self.lrs, self.before = [], [], []

    def training_step(self, batch, batch_idx):
        return -(self.w * batch[0]).mean()

    def on_before_optimizer_step(self, optimizer):
        self.lrs.append(optimizer.param_groups[0]["lr"])
        self.before.append(self.w.item())

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if len(self.weights) < len(self.before):
            self.weights.append((self.w.item() - self.before[-1]) / self.lrs[-1])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self.rate)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Synced(Weigher):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True)
        return loss


class Change(L.Callback):
    """What users do to change the accumulation in the middle of an epoch."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        trainer.accumulate_grad_batches = 1 if batch_idx < 5 else 4


@pytest.mark.world_size(2)
def test_accumulation_that_changes_in_mid_epoch_keeps_weights_and_schedule(every_step_told):
    def rate(step):
        return 0.9**step

    ones = TensorDataset(torch.ones(16 * 32, 1, dtype=torch.float64))
    model = Weigher(rate)
    loader = resilin.AdaptiveDataLoader(ones, batch_size=16, max_local_bsz=8)
    micro_batches = []
    loader.set_batch_size(lambda clock: 16 if clock.steps < 5 else 64)
    resilin.listen(lambda event: micro_batches.append(getattr(event, "accumulation_steps", None)))
    trainer = make_trainer(2, max_epochs=1)
    trainer.fit(model, loader)
    steps = len(model.weights)
    assert trainer.global_step == steps == 5 + 7
    assert model.weights == pytest.approx([1.0] * steps, abs=1e-12)
    assert_identical(flat(model))
    if dist.get_rank() == 0:
        told = [number for number in micro_batches if number is not None]
        assert told == [1] * 5 + [4] * 6 + [3]
    # The schedule is that of the reference run: by samples, at 16 to a step.
    samples = [16 * min(step, 5) + 64 * max(0, step - 5) for step in range(steps)]
    assert model.lrs == pytest.approx([rate(number // 16) for number in samples])

    # Replicas may run unequally many micro-batches: what communicates in each is refused.
    resilin.reset_job()
    loader = resilin.AdaptiveDataLoader(ones, batch_size=16, max_local_bsz=4)
    found = r"self.log\('loss', on_step=True, sync_dist=True\).* step of 16 samples on 2 replicas"
    rule = "every replica would have to run the same number of them, and replicas may run different"
    with pytest.raises(ValueError, match=rf"{found}.* {rule}.* Pass on_step=False, on_epoch=True"):
        make_trainer(2, max_epochs=1).fit(Synced(rate), loader)

    # Upstream (2.6): the gradient of the step before is not cleared where the accumulation begins,
    # and the schedule goes by optimizer steps, whatever they hold.
    plain = Weigher(rate)
    trainer = make_trainer(2, "ddp", max_epochs=1, callbacks=[Change()])
    trainer.fit(plain, DataLoader(ones, batch_size=8))
    assert plain.weights[5] == pytest.approx(1.75)
    samples = [16 * min(step, 5) + 64 * max(0, step - 5) for step in range(len(plain.lrs))]
    assert plain.lrs[8] == pytest.approx(rate(8))
    assert plain.lrs[8] != pytest.approx(rate(samples[8] // 16))


# Exactness -----------------------------------------------------------------------------------


def by_trace(loader):
    text = "step,batchsize\n" + "".join(f"{step},{size}\n" for step, size in enumerate(SIZES))
    loader.set_batch_size(resilin.BatchTrace.parse(text))


def by_schedule(loader):
    loader.set_batch_size(resilin.Schedule(lambda epoch: 10 if epoch < 0.5 else 25, unit="epochs"))


def by_autoscaler(loader):
    loader.autoscale_batch_size(64, local_bsz_bounds=(1, 4))


class Told(L.pytorch.loggers.logger.DummyLogger):
    """A logger that remembers."""

    def __init__(self):
        super().__init__()
        self.told = []

    def log_metrics(self, metrics, step=None):
        self.told.append({"step": step, **metrics})


@pytest.mark.nightly(part="frameworks")
@pytest.mark.world_size(2)
def test_batch_sizes_that_change_train_like_one_process_that_sees_whole_batches():
    for choose, clip in (
        (by_trace, None),
        (by_trace, 0.05),
        (by_schedule, None),
        (by_autoscaler, 1),
    ):
        resilin.reset_job()
        net, loader, logger = Net(), make_loader(), Told()
        choose(loader)
        val = DataLoader(make_data(), batch_size=50)
        trainer = make_trainer(
            2, max_epochs=2, gradient_clip_val=clip, logger=logger, log_every_n_steps=1
        )
        trainer.fit(net, loader, val)
        assert_identical(flat(net))
        assert_each_once(gathered(net.samples), epochs=2)
        assert trainer.global_step == len(net.sizes)
        assert trainer.current_epoch == 2
        assert len(set(net.sizes)) > 1
        assert_same(net, train_whole(net.sizes, clip))
        # One validation at the end of each epoch, on 2 batches of each replica.
        first = [*torch.tensor(net.sizes).cumsum(0)].index(NUM) + 1
        assert net.validated == [first] * 2 + [len(net.sizes)] * 2
        if dist.get_rank() == 0:
            check_logs(logger.told, net.sizes)
        check_metrics(trainer.callback_metrics, net.sizes)


def check_logs(told, sizes):
    steps = [line for line in told if "resilin/gain" in line]
    assert [line["step"] for line in steps] == [*range(len(sizes))]
    assert [line["resilin/batch_size"] for line in steps] == sizes
    progress = torch.tensor([line["resilin/gain"] for line in steps]).cumsum(0)
    assert progress.tolist() == pytest.approx(
        [line["resilin/progress"] for line in steps], rel=1e-4
    )
    noise = [line["resilin/noise_scale"] for line in steps if "resilin/noise_scale" in line]
    assert len(noise) > len(steps) / 2
    assert all(scale > 0 for scale in noise)


def check_metrics(metrics, sizes):
    assert metrics["resilin/batch_size"] == sizes[-1]
    assert metrics["resilin/samples"] == sum(sizes)
    assert {"resilin/gain", "resilin/noise_scale", "resilin/progress", "loss_epoch"} <= set(metrics)


class Logged(Net):
    """Logs the numbers of its samples, in each way that there is."""

    def __init__(self):
        super().__init__()
        self.total, self.mean = torchmetrics.SumMetric(), torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        x, y, index = batch
        number = index.double()
        self.log("mean", number.mean(), on_step=False, on_epoch=True, sync_dist=True)
        for name in ("sum", "max", "min"):
            value = getattr(torch, name)(number)
            self.log(name, value, on_step=False, on_epoch=True, sync_dist=True, reduce_fx=name)
        self.total.update(number)
        self.mean.update(number)
        self.log_dict({"total": self.total, "metric": self.mean}, on_step=False, on_epoch=True)
        return F.cross_entropy(self.net(x), y)


@pytest.mark.nightly(part="frameworks")
@pytest.mark.world_size(2)
def test_values_of_an_epoch_are_over_each_of_its_samples_once():
    # Steps of 8, 8 and 1 sample, in micro-batches of at most 3: in the last step one replica has
    # no sample of its own.
    subset = Subset(make_data(), range(17))
    loader = resilin.AdaptiveDataLoader(subset, batch_size=8, max_local_bsz=3)
    trainer = make_trainer(2, max_epochs=2)
    trainer.fit(Logged(), loader)
    found = {key: float(value) for key, value in trainer.callback_metrics.items()}
    wanted = {"mean": 8.0, "sum": 136.0, "max": 16.0, "min": 0.0, "total": 136.0, "metric": 8.0}
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-12)


# Checkpoints ---------------------------------------------------------------------------------


def fit(net, devices=1, ckpt=None, val=True, **kwargs):
    loader = make_loader()
    trainer = make_trainer(devices, ElasticStrategy(rule="linear", stats_every=1), **kwargs)
    loaders = [DataLoader(make_data(), batch_size=50)] if val else []
    trainer.fit(net, loader, *loaders, ckpt_path=ckpt)
    return trainer


class Keeper(Checkpoint):
    """Saves at every moment at which a ModelCheckpoint may."""

    def __init__(self, directory):
        self.directory = directory

    def save(self, trainer, moment):
        trainer.save_checkpoint(self.directory / f"{trainer.global_step}-{moment}.ckpt")

    def on_train_batch_end(self, trainer, *_):
        self.save(trainer, "step")

    def on_validation_end(self, trainer, *_):
        self.save(trainer, "validation")

    def on_train_epoch_end(self, trainer, *_):
        self.save(trainer, "epoch")


@pytest.mark.nightly(part="frameworks")
@pytest.mark.parametrize("val", [True, False], ids=["validated", "unvalidated"])
def test_checkpoints_of_any_moment_go_on_where_they_were(tmp_path, val):
    whole = Net("step")
    trainer = fit(whole, val=val, max_epochs=3, callbacks=[Keeper(tmp_path)])
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    assert_each_once(whole.samples, epochs=3)
    ends = [step + 1 for step, total in enumerate(cumulated(whole.sizes)) if total % NUM == 0]
    files = sorted(tmp_path.glob("*-*.ckpt"))
    assert len(files) == len(whole.sizes) + len(ends) * (1 + val)
    # In the middle of an epoch, with its last step, and with the one behind that.
    chosen = {2, ends[0], ends[0] + 1, ends[2]}
    for file in files:
        step = int(file.stem.partition("-")[0])
        if step not in chosen:
            continue
        resilin.reset_job()
        net = Net("step")
        trainer = fit(net, val=val, ckpt=file, max_epochs=3)
        assert net.sizes == whole.sizes[step:], file
        assert net.samples == whole.samples[sum(whole.sizes[:step]) :], file
        assert net.lrs == pytest.approx(whole.lrs[step:]), file
        assert trainer.global_step == len(whole.sizes), file
        assert trainer.current_epoch == 3, file
        assert_same(net, whole)
    # Behind the end, with the noise that was known then.
    state = torch.load(tmp_path / "end.ckpt", weights_only=True)["callbacks"]["Elastic"]
    assert state["version"][1] == len(whole.sizes)
    assert {"job", "noise"} <= set(state["tree"])
    assert any(name.startswith("loader/") for name in state["tree"])


def cumulated(sizes):
    return torch.tensor(sizes).cumsum(0).tolist()


def join():
    """Two processes; Lightning takes their number out of the environment when a fit ends."""
    os.environ["WORLD_SIZE"] = "2"
    resilin.init_process_group()


def leave():
    """This process is alone from now on."""
    dist.destroy_process_group()
    resilin.reset_job()


@pytest.mark.nightly(part="frameworks")
@pytest.mark.world_size(2, init=False)
def test_a_job_resumes_in_mid_epoch_on_one_process_and_again_on_two(shared_path):
    first = int(os.environ["RANK"]) == 0

    def stop_at(step, name):
        """Saves behind this step, and ends."""
        keeper = ModelCheckpoint(shared_path, filename=name, every_n_train_steps=step)
        return {"max_steps": step, "callbacks": [keeper]}

    join()
    nets = [Net("step"), Net("step"), Net("step")]
    fit(nets[0], 2, **stop_at(3, "two"))
    samples = gathered(nets[0].samples)
    leave()
    if first:
        fit(nets[1], 1, shared_path / "two.ckpt", **stop_at(5, "one"))
        samples += nets[1].samples
        leave()
    join()
    trainer = fit(nets[2], 2, shared_path / "one.ckpt", max_epochs=2)
    assert trainer.current_epoch == 2
    assert_identical(flat(nets[2]))
    behind = gathered(nets[2].samples)
    if first:
        # 3 and 2 steps of the first epoch, and the rest.
        assert cumulated(nets[0].sizes + nets[1].sizes)[-1] < NUM
        assert_each_once(samples + behind, epochs=2)
        sizes = nets[0].sizes + nets[1].sizes + nets[2].sizes
        assert trainer.global_step == len(sizes)
        lrs = nets[0].lrs + nets[1].lrs + nets[2].lrs
        # As in the reference run, whose 11 steps of an epoch hold as many samples.
        steps = [number * 11 // NUM for number in [0, *cumulated(sizes)][:-1]]
        assert lrs == pytest.approx([0.1 * 0.97**step for step in steps])

    # Upstream (2.6): the loader begins anew, and leaves as many batches away as were done.
    plain = [Net(), Net()]
    trainer = make_trainer(2, "ddp", **stop_at(3, "plain"))
    trainer.fit(plain[0], DataLoader(make_data(), batch_size=5, shuffle=True))
    samples = gathered(plain[0].samples)
    leave()
    if first:
        trainer = make_trainer(1, "ddp", max_epochs=1)
        loader = DataLoader(make_data(), batch_size=10, shuffle=True)
        trainer.fit(plain[1], loader, ckpt_path=shared_path / "plain.ckpt")
        samples += plain[1].samples
        repeated, missing = len(samples) - len(set(samples)), NUM - len(set(samples))
        assert repeated > 0
        assert missing > 0
        leave()


def test_without_lightning_one_sentence_says_what_to_install():
    code = "import sys; sys.modules['lightning'] = None; import resilin.integrations.lightning"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1] == (
        "ImportError: resilin.integrations.lightning needs lightning: "
        "pip install 'resilin[lightning]'"
    )


# What is refused, and what is not -------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"accumulate_grad_batches": 4}, r"accumulate_grad_batches \(4\) must be 1"),
        ({"limit_train_batches": 7}, r"limit_train_batches \(7\) must be 1.0"),
        ({"overfit_batches": 2}, r"overfit_batches \(2\) must be 0.0"),
        ({"val_check_interval": 0.5}, r"val_check_interval \(0.5\) must be 1.0"),
        pytest.param(
            {"val_check_interval": "00:00:01:00"},
            r"val_check_interval \(a time\) must be 1.0",
            marks=pytest.mark.skipif(
                not hasattr(callbacks, "EMAWeightAveraging"), reason="Lightning 2.6 has it"
            ),
        ),
        ({"reload_dataloaders_every_n_epochs": 1}, r"every_n_epochs \(1\) must be 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_cannot_be_honoured_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(max_epochs=1, **settings).fit(Net(), make_loader())


@pytest.mark.parametrize("callback", [Change(), GradientAccumulationScheduler({0: 1, 1: 4})])
def test_accumulation_that_callbacks_change_is_refused_when_it_changes(callback):
    trainer = make_trainer(max_epochs=2, callbacks=[callback])
    with pytest.raises(ValueError, match=r"accumulate_grad_batches \(4\) must be 1"):
        trainer.fit(Net(), make_loader())


def test_loaders_loops_and_strategies_of_other_kinds_are_refused():
    trainer = make_trainer(max_epochs=1)
    with pytest.raises(ValueError, match=r"is a DataLoader and must be a resilin\.Adaptive"):
        trainer.fit(Net(), DataLoader(make_data(), batch_size=10))
    resilin.reset_job()
    manual = Net()
    manual.automatic_optimization = False
    with pytest.raises(ValueError, match=r"automatic_optimization \(False\) of Net must be True"):
        make_trainer(max_epochs=1).fit(manual, make_loader())
    with pytest.raises(ValueError, match=r"strategy \(DDPStrategy\) must be an ElasticStrategy"):
        make_trainer(1, "ddp", max_epochs=1, callbacks=[Elastic()]).fit(
            Net(), DataLoader(make_data(), batch_size=10)
        )
    with pytest.raises(ValueError, match=r"ddp_comm_hook .* must be None: the reduction"):
        ElasticStrategy(ddp_comm_hook=print)


class Several(Net):
    """Schedulers that a clock cannot step."""

    def __init__(self, **config):
        super().__init__()
        self.config = config

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        both = [torch.optim.lr_scheduler.StepLR(optimizer, 5) for _ in range(2)]
        config = dict(self.config)
        return [optimizer], [
            {"scheduler": scheduler, "interval": "step", **config}
            for scheduler in both[: config.pop("number", 1)]
        ]


class Custom(Several):
    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step()


def test_schedulers_that_a_clock_cannot_step_are_refused_and_left_to_the_user():
    refused = [
        (Several(number=2), "2 schedulers have interval='step', and schedule_by .'rule'. can"),
        (Several(frequency=3), r"frequency \(3\) of a scheduler must be 1"),
        (Custom(), "lr_scheduler_step.. of Custom would not be called"),
    ]
    for module, message in refused:
        resilin.reset_job()
        with pytest.raises(ValueError, match=message):
            make_trainer(max_epochs=1).fit(module, make_loader())
    resilin.reset_job()
    net = Custom()
    make_trainer(1, ElasticStrategy(schedule_by="user"), max_epochs=1).fit(net, make_loader())
    # The Trainer steps it, once per optimizer step.
    assert net.lrs[:6] == pytest.approx([0.1] * 5 + [0.01])


@pytest.mark.nightly(part="frameworks")
@pytest.mark.parametrize("precision", ["bf16-mixed", "scaled"])
def test_mixed_precision_trains(precision):
    class Halves(Net):
        def training_step(self, batch, batch_idx):
            x, *rest = batch
            return super().training_step((x.float(), *rest), batch_idx)

    plugins = {"precision": precision}
    if precision == "scaled":
        # With float16 on the CPU only to have a GradScaler here.
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=1000)
        plugins = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
    net = Halves()
    net.net.float()
    monitor = LearningRateMonitor()
    trainer = make_trainer(
        max_epochs=4, gradient_clip_val=1.0, logger=Told(), callbacks=[monitor], **plugins
    )
    trainer.fit(net, make_loader())
    assert_each_once(net.samples, epochs=4)
    assert trainer.callback_metrics["loss_epoch"] < 0.9
    steps = resilin.current_job().clock.steps
    # The first ones overflow: the scaler skips them, and they are no steps.
    assert steps == len(net.sizes) if precision == "bf16-mixed" else 0 < steps < len(net.sizes)


@pytest.mark.nightly(part="frameworks")
def test_an_epoch_of_progress_and_one_of_dropped_tails_end_with_a_validation():
    for settings, rule in (({}, "adascale"), ({"drop_last": True}, "linear")):
        resilin.reset_job()
        net, loader = Net("step"), make_loader(**settings)
        trainer = make_trainer(1, ElasticStrategy(rule=rule, stats_every=1), max_epochs=3)
        trainer.fit(net, loader, DataLoader(make_data(), batch_size=50))
        assert len(net.validated) == 9
        assert net.validated[-1] == trainer.global_step == len(net.sizes)
        assert trainer.current_epoch == 3
    assert resilin.current_job().clock.progress > 0


@pytest.mark.nightly(part="frameworks")
def test_quick_runs_and_numbers_of_steps_between_validations_are_honoured():
    net = Net()
    trainer = make_trainer(fast_dev_run=2)
    trainer.fit(net, make_loader(), DataLoader(make_data(), batch_size=50))
    assert trainer.global_step == 2
    resilin.reset_job()
    net = Net()
    trainer = make_trainer(max_epochs=1, val_check_interval=3)
    trainer.fit(net, make_loader(), DataLoader(make_data(), batch_size=NUM))
    assert net.validated == [*range(3, trainer.global_step + 1, 3)]


# Recovery ------------------------------------------------------------------------------------


@pytest.mark.nightly(part="frameworks")
def test_a_lost_worker_costs_no_sample(tmp_path):
    job = Path(__file__).with_name("lightning_job.py")
    command = [sys.executable, "-m", "resilin.cli", "run", "--warm", "--nproc", "2", job, tmp_path]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "RESILIN_RUN_DIR": "off"}
    done = forked.run(command, capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, done.stderr
    files = tmp_path.glob("*.jsonl")
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    # A step that two generations have made counts as the last one made it.
    made_by: dict[int, int] = {}
    for line in lines:
        made_by[line["step"]] = max(line["generation"], made_by.get(line["step"], 0))
    assert set(made_by.values()) == {0, 1}
    kept = [line for line in lines if line["generation"] == made_by[line["step"]]]
    assert_each_once([sample for line in kept for sample in line["samples"]], epochs=2)
    assert sorted(made_by) == [*range(22)]
    # Both epochs have stepped the scheduler, one of them across the loss.
    assert done.stdout.count("ended: epoch 2, step 22, lr 0.025") == 2


# Fabric --------------------------------------------------------------------------------------


def train_with_fabric(devices, path=None, stop=None, load=None, clip=None):
    strategy = ElasticFabricStrategy(rule="constant", stats_every=1)
    fabric = L.Fabric(accelerator="cpu", devices=devices, strategy=strategy)
    fabric.launch()
    net, job = Net(), resilin.current_job()
    optimizer = net.configure_optimizers()
    model, optimizer, loader = setup(fabric, net.net, optimizer, make_loader())
    state = {"model": model, "optimizer": optimizer, "resilin": JobState()}
    if load is not None:
        fabric.load(load, state)
    for _ in resilin.remaining_epochs_until(2):
        for x, y, index in loader:
            if loader.current_samples:
                net.samples += index.tolist()
            fabric.backward(F.cross_entropy(model(x), y))
            if clip is not None:
                fabric.clip_gradients(model, optimizer, max_norm=clip)
            optimizer.step()
            optimizer.zero_grad()
            if job.micro_batch.last:
                net.sizes.append(job.micro_batch.samples)
            if job.micro_batch.last and job.clock.steps == stop:
                fabric.save(path, state)
                return net
    return net


@pytest.mark.world_size(2, init=False)
def test_fabric_trains_exactly_and_resumes_on_another_number_of_processes(shared_path):
    first = int(os.environ["RANK"]) == 0
    path = shared_path / "state.ckpt"
    for clip in (None, 0.05):
        join()
        two = train_with_fabric(2, path, stop=4, clip=clip)
        samples = gathered(two.samples)
        leave()
        if first:
            one = train_with_fabric(1, load=path, clip=clip)
            assert_each_once(samples + one.samples, epochs=2)
            assert_same(one, train_whole(two.sizes + one.sizes, clip))
            leave()

    # Upstream (2.6): the sampler repeats samples where the processes do not divide them.
    join()
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    loader = fabric.setup_dataloaders(DataLoader(make_data(), batch_size=5, shuffle=True))
    samples = gathered([sample for _, _, index in loader for sample in index.tolist()])
    assert len(samples) == NUM + 1
    leave()


def test_fabric_refuses_what_it_cannot_honour():
    net = Net()
    plain = L.Fabric(accelerator="cpu", devices=1)
    with pytest.raises(ValueError, match="must be an ElasticFabricStrategy"):
        setup(plain, net.net, net.configure_optimizers(), make_loader())
    fabric = L.Fabric(accelerator="cpu", devices=1, strategy=ElasticFabricStrategy())
    fabric.launch()
    with pytest.raises(ValueError, match=r"is a DataLoader and must be a resilin\.Adaptive"):
        setup(fabric, net.net, net.configure_optimizers(), DataLoader(make_data()))
    with pytest.raises(ValueError, match="without its optimizer"):
        fabric.setup_module(net.net)
    model, *_ = setup(fabric, net.net, net.configure_optimizers(), make_loader())
    with (
        pytest.raises(ValueError, match=r"no_backward_sync\(enabled=True\) is not supported"),
        fabric.no_backward_sync(model, enabled=True),
    ):
        pass


def test_a_stream_is_refused():
    trainer = make_trainer(max_epochs=1)
    with pytest.raises(ValueError, match=r"Lightning's Trainer counts the steps.*stream Numbered"):
        trainer.fit(Net(), resilin.AdaptiveDataLoader(Numbered(), 4))
