"""Several optimizers in one step, within Accelerate and Fabric: the run is that of plain torch."""

import pytest
import torch.distributed as dist
import torch.nn.functional as F

import resilin
from tests.training.gates.test_several import BATCH, EPOCHS, ROWS, Parts, data, plain, same
from tests.world import LAUNCHER

pytest.importorskip("accelerate")
pytest.importorskip("lightning")

import lightning as L
from accelerate import Accelerator

from resilin.integrations.accelerate import prepare
from resilin.integrations.lightning import ElasticFabricStrategy, JobState, setup

pytestmark = pytest.mark.filterwarnings("ignore:The `srun` command is available")
PRELOAD = ("resilin.integrations.accelerate", "resilin.integrations.lightning")
STEPS = EPOCHS * -(-ROWS // BATCH)


def loader():
    return resilin.AdaptiveDataLoader(data(), BATCH, max_local_bsz=3, shuffle=False)


def by_accelerate(tmp_path, epochs, start=None):
    resilin.reset_job()
    p, accelerator = Parts(), Accelerator(cpu=True)
    parts = prepare(accelerator, p.net, p.first, *p.schedulers, loader(), p.second, rule="constant")
    model, first, *schedulers, batches, second = parts
    if start is not None:
        accelerator.load_state(start)
    for _ in resilin.remaining_epochs_until(epochs):
        for x, y in batches:
            accelerator.backward(F.mse_loss(model(x), y))
            for optimizer in (first, second):
                optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
            for optimizer in (first, second):
                optimizer.zero_grad()
    accelerator.save_state(tmp_path / f"state-{epochs}")
    return p


def by_fabric(tmp_path, epochs, start=None):
    resilin.reset_job()
    strategy = ElasticFabricStrategy(rule="constant", schedule_by="rule")
    fabric = L.Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    p = Parts()
    model, optimizers, batches = setup(fabric, p.net, p.both, loader(), p.schedulers)
    state = {"model": model, "resilin": JobState()}
    state |= {f"optimizer{n}": optimizer for n, optimizer in enumerate(optimizers)}
    state |= {f"scheduler{n}": scheduler for n, scheduler in enumerate(p.schedulers)}
    if start is not None:
        fabric.load(start, state)
    for _ in resilin.remaining_epochs_until(epochs):
        for x, y in batches:
            fabric.backward(F.mse_loss(model(x), y))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    fabric.save(tmp_path / f"state-{epochs}", state)
    dist.destroy_process_group()  # Fabric does not
    return p


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    """Fabric puts the variables of a launcher there, and leaves them."""
    for name in LAUNCHER:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize("home", [by_accelerate, by_fabric])
def test_two_optimizers_make_the_steps_of_plain_torch_and_resume(tmp_path, home):
    whole = home(tmp_path, EPOCHS)
    assert same(whole, plain())
    assert [scheduler.last_epoch for scheduler in whole.schedulers] == [STEPS, STEPS]
    home(tmp_path, 1)
    resumed = home(tmp_path, EPOCHS, tmp_path / "state-1")
    assert same(resumed, plain())


def test_accelerate_refuses_a_scaler_that_each_of_them_would_update():
    p = Parts()
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = object()
    with pytest.raises(ValueError, match=r"mixed_precision \(no\) must be 'no' or 'bf16'"):
        prepare(accelerator, p.net, *p.both, loader())
