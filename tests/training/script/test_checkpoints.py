"""What one process does for all replicas."""

import pytest
import torch

import resilin
from tests.replicas import gathered, replica


@pytest.mark.world_size(2)
def test_one_replica_does_it_and_all_have_the_result():
    calls = []

    def work():
        calls.append(replica())
        return {"id": "a", "numbers": (1, 2.5, float("inf")), "nothing": None}

    result = resilin.on_one_replica(work)
    assert result == {"id": "a", "numbers": (1, 2.5, float("inf")), "nothing": None}
    assert gathered(calls) == [0]


@pytest.mark.world_size(2)
def test_a_function_that_fails_fails_on_all():
    def work():
        raise OSError("the disk is full")

    kind = OSError if replica() == 0 else RuntimeError
    with pytest.raises(kind, match="the disk is full"):
        resilin.on_one_replica(work)
    # Nobody waits for anybody: they can go on.
    assert resilin.on_one_replica(lambda: 3) == 3


def test_a_result_that_cannot_be_sent_is_refused():
    with pytest.raises(ValueError, match="has tensors: write them to a file"):
        resilin.on_one_replica(lambda: torch.ones(3))
    with pytest.raises(ValueError, match="cannot be saved"):
        resilin.on_one_replica(lambda: object())
