"""Host memory that a state is copied into: what is used again, and what may change meanwhile."""

import pytest
import torch

from resilin.core.placement import Placement
from resilin.engine import devices
from resilin.training.state.stage import Block, Stage


def pieces(**tensors):
    return {(name, None): tensor for name, tensor in tensors.items()}


def test_a_block_is_used_again_while_names_shapes_and_types_are_the_same():
    first = pieces(a=torch.ones(3), b=torch.zeros(2, 2).bfloat16(), c=torch.empty(0, 4))
    block = Block(first, 4096)
    assert block.fits(first)
    assert block.fits(pieces(c=torch.empty(0, 4), b=first["b", None] + 1, a=torch.ones(3)))
    assert not block.fits(pieces(a=torch.ones(3), b=torch.zeros(2, 2).bfloat16()))
    assert not block.fits(first | pieces(a=torch.ones(4)))
    assert not block.fits(first | pieces(a=torch.ones(3).double()))
    assert not block.fits(first | pieces(d=torch.ones(1)))
    part = Placement((6,), (3,), (3,))
    assert not block.fits({("a", part) if k[0] == "a" else k: t for k, t in first.items()})


def test_what_was_staged_stays_when_the_tensors_change():
    state = pieces(a=torch.arange(5.0), n=torch.tensor(7), flags=torch.tensor([True, False]))
    block = Block(state, 0)
    # In another order than that of the places.
    block.begin(dict(reversed(state.items())))()
    for tensor in state.values():
        tensor.zero_()
    assert bytes(block.data[:20].tolist()) == torch.arange(5.0).numpy().tobytes()
    offsets = block.layout.offsets
    assert [offset % 64 for offset in offsets] == [0, 0, 0]
    assert block.data[offsets[1]] == 7
    assert block.data[offsets[2] : offsets[2] + 2].tolist() == [1, 0]


def test_a_tensor_that_needs_a_gradient_is_staged_without_one():
    weight = torch.ones(3, requires_grad=True)
    block = Block(pieces(w=weight), 0)
    block.begin(pieces(w=weight))()
    assert not block.data.requires_grad
    staged = Stage().begin(pieces(w=weight)).complete()
    assert not staged["w", None].requires_grad


class Queue(devices.Device):
    """Computes as the CPU does, and says when it was waited for."""

    kind = "cpu"
    queues = True

    def __init__(self):
        self.waits = 0

    def wait(self, device):
        self.waits += 1


def test_a_device_that_queues_is_waited_for_by_whoever_writes(monkeypatch):
    kind = Queue()
    monkeypatch.setattr(devices, "_KINDS", (kind,))
    state = pieces(a=torch.ones(3), b=torch.ones(2))
    wait = Block(state, 0).begin(state)
    staged = Stage().begin(state)
    assert kind.waits == 0
    wait()
    assert kind.waits == 1
    assert staged.complete()["a", None].tolist() == [1, 1, 1]
    assert kind.waits == 2
    # Its tensors stay until then, whoever else lets go of them.
    assert staged.sources is state


@pytest.mark.parametrize("made", [dict, lambda pairs: dict(reversed(list(pairs)))])
def test_buffers_of_a_stage_are_those_of_their_names(made):
    stage = Stage()
    first = stage.begin(pieces(a=torch.ones(3), b=torch.zeros(3))).complete()
    addresses = {piece: tensor.data_ptr() for piece, tensor in first.items()}
    again = made(pieces(a=torch.full((3,), 5.0), b=torch.full((3,), 6.0)).items())
    second = stage.begin(again).complete()
    assert {piece: tensor.data_ptr() for piece, tensor in second.items()} == addresses
    assert (second["a", None][0], second["b", None][0]) == (5, 6)
