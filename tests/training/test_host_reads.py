"""Nothing on the way of a step makes the host wait for the device.

The counting device (`tests/counted`) notices each read, each copy from pageable memory and each
wait. After some steps to warm up, there is none of them in a step, measured or not.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from resilin.training.step import Steps
from tests.counted import group
from tests.counted.device import Told
from tests.counted.loop import STEPS, Run, Setup, train
from tests.replicas import replica

SETUPS = {
    "plain": Setup(cross_check=1),
    "accumulation": Setup(micro_batches=3),
    "groups": Setup(groups=True, clip=True),
    "tokens": Setup(tokens=True, micro_batches=2),
    "scaler": Setup(scaler=True, clip=True),
    "records": Setup(record=True, events=Path("events"), accumulator=True),
    "autoscaling": Setup(autoscale=True),
    "recovery": Setup(checkpoints=Path("checkpoints"), memory_every=10**6),
    "prefetch": Setup(prefetch=True, micro_batches=2),
    "copies": Setup(checkpoints=Path("checkpoints"), memory_every=2),
}
OF_TORCH = ("torch/amp/grad_scaler.py", "_maybe_opt_step")
"""A GradScaler asks once per step whether the gradient was finite; nobody else may ask anything."""


def of_torch(told: Told) -> bool:
    return told.what == "read" and all(part in told.stack[1] for part in OF_TORCH)


def of_copy(told: Told) -> bool:
    """The noise is part of the state: a copy that follows a measured step waits for its norms."""
    waits = told.what == "wait" and "scaling/estimates.py" in str(told)
    return waits and "memory_schedule.py" in str(told)


def on_the_way(told: Told) -> bool:
    """Whether it was in a thread of the step: the main one, or one of autograd's."""
    return told.thread == "MainThread" or told.thread.startswith("Dummy-")


def stalls(run: Run) -> list[Told]:
    """What made the step wait: an event of an earlier step is not among it.

    Nor is the thread that writes a copy of the state, which waits for the staging of that copy.
    """
    waits = [told for told in run.of("wait") if told.age == 0 and on_the_way(told)]
    waits = [told for told in waits if not of_copy(told)]
    return [told for told in run.of("read", "upload") if not of_torch(told)] + waits


def check(counted, monkeypatch, tmp_path: Path, setup: Setup, replicas: int) -> None:
    if setup.checkpoints is not None:
        monkeypatch.setenv("RESILIN_MEMORY_DIR", str(tmp_path / "memory"))
    if setup.events is not None:
        monkeypatch.delenv("RESILIN_RUN_DIR")
    run = train(counted, setup.within(tmp_path), replicas)
    assert not stalls(run), "\n\n".join(map(str, stalls(run)))
    asked = [told for told in run.told if of_torch(told)]
    assert len(asked) == (STEPS if setup.scaler else 0)
    assert torch.isfinite(run.parameters).all()
    # It can only be said of what was done.
    if setup.measured and not setup.autoscale:
        assert run.model.noise is not None
    copies = [told for told in run.of("fetch") if "training/state/memory.py" in str(told)]
    assert bool(copies) == (setup.memory_every == 2)
    if setup.record and replica() == 0:
        assert [told for told in run.of("fetch") if "recorder.py" in str(told)]


@pytest.mark.world_size(1)
@pytest.mark.parametrize("measured", [False, True], ids=["unmeasured", "measured"])
@pytest.mark.parametrize("name", SETUPS)
def test_no_host_read_of_one_replica(
    counted, monkeypatch, tmp_path, every_step_told, name, measured
):
    check(counted, monkeypatch, tmp_path, SETUPS[name].but(measured=measured), 1)


@pytest.mark.world_size(2, init=False)
@pytest.mark.parametrize("measured", [False, True], ids=["unmeasured", "measured"])
@pytest.mark.parametrize("name", SETUPS)
def test_no_host_read_of_two_replicas(
    counted, monkeypatch, shared_path, every_step_told, name, measured
):
    group.join()
    check(counted, monkeypatch, shared_path, SETUPS[name].but(measured=measured), 2)


@pytest.mark.world_size(1)
def test_prefetched_batches_are_copied_beside_the_steps_before_theirs(counted):
    run = train(counted, Setup(prefetch=True))
    assert len({told.how.partition("] ")[2] for told in run.of("send")}) == 1
    assert [told.age for told in run.of("order")] == [2] * STEPS
    assert len(run.of("send")) == 2 * STEPS


def of_optimizer(self):
    return self.optimizers[0].param_groups[0]["params"][0]


def of_gradient(self):
    return self.gradient.parameters.all[0]


@pytest.mark.world_size(1)
@pytest.mark.parametrize(
    ("owner", "name", "parameter", "thread"),
    [
        (Steps, "_committed", of_optimizer, "MainThread"),
        (Steps, "_reduce", of_gradient, "Dummy-"),
    ],
    ids=["optimizer.step", "backward"],
)
def test_one_item_that_is_put_back_is_caught_with_its_line(
    counted, monkeypatch, owner, name, parameter, thread
):
    own = getattr(owner, name)

    def mutated(self, *args, **kwargs):
        parameter(self).sum().item()  # put back
        return own(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, mutated)
    found = [told for told in stalls(train(counted, Setup())) if "# put back" in told.place]
    assert len(found) >= STEPS
    assert any(told.thread.startswith(thread) for told in found)
    assert all("test_host_reads.py" in told.place for told in found)
