"""Whatever resilin replaces in a user's objects, it gives back."""

import pytest
import torch
from torch import nn

import resilin
from resilin.training.gates.patch import Patch


class Thing:
    def name(self):
        return "of the class"


def test_what_the_class_has_comes_back():
    thing = Thing()
    patch = Patch(thing, {"name": lambda: "patched", "other": 1})
    assert (thing.name(), thing.other) == ("patched", 1)
    patch.remove()
    assert thing.name() == "of the class"
    assert vars(thing) == {}


def test_what_the_instance_had_comes_back_whatever_others_put_there():
    thing, own = Thing(), object()
    thing.name = own
    patch = Patch(thing, {"name": 1})
    thing.name = "somebody else's"
    patch.remove()
    assert thing.name is own
    thing.name = "later"
    patch.remove()
    assert thing.name == "later"


@pytest.fixture(autouse=True)
def _new_job():
    resilin.reset_job()


def test_a_released_model_leaves_no_trace_in_the_objects_of_the_user():
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    touched = (net, optimizer, scheduler, scaler)
    before = [dict(vars(thing)) for thing in touched]
    kinds = [type(thing) for thing in touched]
    descriptor = vars(torch.optim.lr_scheduler.LRScheduler).get("optimizer")
    model = resilin.AdaptiveDataParallel(net, optimizer, scheduler, batch_size=2, scaler=scaler)
    assert [dict(vars(thing)) for thing in (net, optimizer, scaler)] != before
    accelerator = Thing()
    model.add_gate(Patch(accelerator, {"name": lambda: "patched"}))
    for _ in range(2):
        model.release()
        assert [dict(vars(thing)) for thing in touched] == before
        assert [type(thing) for thing in touched] == kinds
        assert accelerator.name() == "of the class"
    assert vars(torch.optim.lr_scheduler.LRScheduler).get("optimizer") is descriptor
    scaler.scale(net(torch.ones(2, 3)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
