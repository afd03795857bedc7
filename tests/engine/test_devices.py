"""The seam between training and devices, with a kind of device that is made up."""

import os
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import resilin
from resilin.engine import devices
from resilin.training.sizing.memory_limit import SHARE, LocalLimit

PACKAGE = Path(resilin.__file__).parent
EPOCHS, STEPS, MICRO_BATCHES = 2, 16, 4


class Later:
    """An event that the device passes after it was asked for twice, or waited for."""

    def __init__(self, calls):
        self.asked = 0
        self.calls = calls

    def synchronize(self):
        # Norms are read by the thread that trains; those that write wait for what is copied.
        training = threading.current_thread() is threading.main_thread()
        self.calls.append("read" if training else "wait")
        self.asked = 2

    def query(self):
        self.asked += 1
        return self.asked > 2

    def elapsed_time(self, later):
        return 5.0


class MadeUp(devices.Device):
    """Computes as the CPU does, and remembers what it was asked for."""

    kind = "cpu"
    batches_kernels = True
    queues = True

    def __init__(self, memory=None):
        self.calls = []
        self.memory = memory
        self.peaks = []

    def choose(self, local_process):
        self.calls.append(("choose", local_process))

    def event(self, device):
        return Later(self.calls)

    def wait(self, device):
        self.calls.append("wait")

    def end_micro_batch(self):
        self.calls.append("end_micro_batch")

    def total_memory(self):
        return self.memory

    def peak_memory(self):
        return self.peaks.pop(0) if self.peaks else None

    def release_memory(self):
        self.calls.append("release_memory")


@pytest.fixture
def made_up(monkeypatch):
    kind = MadeUp()
    monkeypatch.setattr(devices, "_KINDS", (kind,))
    return kind


def train(directory=None, fail_at=None):
    resilin.reset_job()
    if directory is not None:
        resilin.checkpoint_to(directory, every=None, memory_every=1)
    torch.manual_seed(0)
    x = torch.randn(64, 5, dtype=torch.float64)
    data = TensorDataset(x, x @ torch.randn(5, 2, dtype=torch.float64))
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    model = resilin.AdaptiveDataParallel(net, optimizer, rule="adascale", stats_every=1)
    each = 8 // resilin.current_job().engine.membership.num_replicas // MICRO_BATCHES
    loader = resilin.AdaptiveDataLoader(data, batch_size=8, shuffle=True, max_local_bsz=each)
    for _ in resilin.remaining_epochs_until(EPOCHS):
        for inputs, targets in loader:
            with loader.retry_smaller():
                loss = (model(inputs) - targets).square().mean()
                if model.clock.steps == fail_at:
                    fail_at = None
                    raise torch.OutOfMemoryError("made up")
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    return model, torch.cat([p.detach().flatten() for p in net.parameters()])


@pytest.mark.world_size(2)
def test_training_on_it_ends_as_on_the_cpu(monkeypatch):
    _, expected = train()
    kind = MadeUp()
    monkeypatch.setattr(devices, "_KINDS", (kind,))
    model, parameters = train()
    assert torch.allclose(parameters, expected, rtol=1e-10, atol=0)
    assert model.clock.steps == STEPS
    # The last micro-batch of a step ends with the reduction, which reads what it needs.
    assert kind.calls.count("end_micro_batch") == STEPS * (MICRO_BATCHES - 1)
    # How long a reduction took is known when the device has passed its end, by the device's clock.
    assert [model._steps.gradient.sync.seconds() for _ in range(3)] == [None, None, 0.005]


def test_state_is_copied_when_the_device_has_done_its_part(tmp_path, monkeypatch, made_up):
    monkeypatch.setenv("RESILIN_MEMORY_DIR", str(tmp_path / "memory"))
    _, parameters = train(tmp_path / "checkpoints")
    # Copies in memory before the first step, behind each step and each epoch; a checkpoint at last.
    assert made_up.calls.count("wait") == 1 + STEPS + EPOCHS + 1
    # Nothing is left to train, so what is there in the end is what was saved.
    monkeypatch.delenv("RESILIN_MEMORY_DIR")
    _, saved = train(tmp_path / "checkpoints")
    assert torch.equal(saved, parameters)


def test_memory_that_ran_out_is_given_back(made_up):
    _, parameters = train(fail_at=5)
    assert made_up.calls.count("release_memory") == 1
    _, expected = train()
    assert torch.allclose(parameters, expected, rtol=1e-10, atol=0)


def test_what_fits_is_learned_from_the_peaks_of_the_device(monkeypatch):
    kind = MadeUp(memory=1000)
    monkeypatch.setattr(devices, "_KINDS", (kind,))
    limit = LocalLimit(None, start=4)
    assert limit.budget == SHARE * 1000
    kind.peaks = [0, 200, 300]
    for size in (4, 8, 8):
        with limit.measure(size):
            pass
    # 25 bytes a sample, and 100 whatever the size.
    assert limit._fits() == (900 - 100) // 25


def test_a_device_that_does_not_tell_its_memory_needs_a_budget(made_up):
    with pytest.raises(ValueError, match=r"device \(cpu\).*memory_budget="):
        LocalLimit(None, start=4)


@pytest.mark.world_size(2, init=False)
def test_each_replica_takes_its_device_and_the_backend_of_the_device(monkeypatch):
    kind = MadeUp()
    monkeypatch.setattr(devices, "_KINDS", (kind,))
    rank = int(os.environ["RANK"])
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    resilin.init_process_group()
    assert kind.calls == [("choose", rank)]
    assert "gloo" in torch.distributed.get_backend()


def test_only_the_seam_names_devices():
    named = re.compile(r"torch\.(cuda|xpu|mps)\b|\.is_(cuda|xla)\b|torch_xla|[\"']cuda[\"':]")
    rooms = ("core", "training", "engine", "integrations", "telemetry", "lab")
    found = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for limit in rooms
        for path in sorted((PACKAGE / limit).rglob("*.py"))
        if path != PACKAGE / "engine" / "devices.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if named.search(line)
    ]
    assert found == []


# PyTorch/XLA, as far as its interface goes -----------------------------------------------------


class FakeXla(SimpleNamespace):
    """What resilin calls of torch_xla 2.9, with its signatures."""

    def __init__(self):
        info = {"bytes_used": 1, "bytes_limit": 4000, "peak_bytes_used": 30}
        self.synced = []
        xla_model = SimpleNamespace(get_memory_info=lambda device=None: info)
        self.core = SimpleNamespace(xla_model=xla_model)

    def device(self, index=None):
        return torch.device("meta")

    def sync(self, wait=False, reset_scope=True):
        self.synced.append(wait)


def test_xla_is_there_when_the_script_has_imported_it(monkeypatch):
    assert devices.here().kind == "cpu"
    fake = FakeXla()
    monkeypatch.setitem(sys.modules, "torch_xla", fake)
    kind = devices.here()
    assert (kind.kind, kind.backend) == ("xla", "xla")
    assert devices.of(torch.device("xla", 0)) is kind
    assert kind.current() == torch.device("meta")
    assert (kind.total_memory(), kind.peak_memory()) == (4000, 30)
    kind.end_micro_batch()
    kind.wait(torch.device("xla", 0))
    assert fake.synced == [False, True]
    # It copies when asked: nothing is under way, and no event has to be waited for.
    assert not kind.queues
    assert kind.event(torch.device("xla", 0)) is None


def test_cuda_is_known_by_its_type_and_nothing_else_is():
    assert devices.of(torch.device("cuda", 1)).backend == "cpu:gloo,cuda:nccl"
    for kind in ("cpu", "meta", "mps"):
        assert devices.of(torch.device(kind)) is devices.CPU


@pytest.mark.world_size(1)
def test_another_accelerator_of_torch_has_its_events_and_pinned_memory(counted):
    kind = devices.here()
    assert devices.of(counted.device) is kind
    assert (kind.kind, kind.queues, kind.pins) == ("counted", True, True)
    assert kind.is_here()
    assert kind.backend == "gloo"  # nobody has registered one
    kind.choose(0)
    assert kind.current() == counted.device
    assert kind.random_state() is None  # it has no generator of its own
    kind.seed(1)
    first, second = kind.event(counted.device), kind.event(counted.device)
    assert first.query()
    assert first.elapsed_time(second) >= 0.0
    assert {told.what for told in counted.told()} == {"query"}
    counted.clear()
    target = torch.zeros(2, pin_memory=True)
    wait = devices.begin_to_host([(target, torch.ones(2, device=counted.device))])
    assert [told.what for told in counted.told()] == ["fetch"]
    # Another thread waits, whose current stream may be another one.
    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join()
    assert target.tolist() == [1.0, 1.0]
    assert [told.what for told in counted.told()] == ["fetch", "wait"]


@pytest.mark.world_size(1)
def test_fetched_numbers_arrive_when_the_device_has_passed_their_event(counted):
    source = torch.ones(2, device=counted.device)
    counted.set_lag(2)
    fetched = devices.Fetched(source)
    source.fill_(5.0)
    assert not fetched.arrived()
    assert counted.told("read", "wait") == []
    assert fetched.read() == [1.0, 1.0]
    assert len(counted.told("wait")) == 1
    later = devices.Fetched(source)
    assert [later.arrived() for _ in range(3)] == [False, False, True]
    assert later.read() == [5.0, 5.0]
    assert counted.told("read") == []


def test_fetched_numbers_of_the_host_are_there():
    fetched = devices.Fetched(torch.ones(2))
    assert fetched.arrived()
    assert fetched.read() == [1.0, 1.0]
