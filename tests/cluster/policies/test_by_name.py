"""Policies by name."""

from __future__ import annotations

import pytest

from resilin.cluster.policies.by_name import POLICIES, by_name


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_can_be_made_and_knows_its_name(name):
    assert by_name(name).name == name


def test_options_reach_the_policy_or_are_refused():
    assert by_name("ours", p=0.5, horizon=100.0, growth=2.0, first=1, patience=60.0)
    with pytest.raises(ValueError, match=r"p \(-1.0\) must be at least 0"):
        by_name("ours", p=-1.0)
    with pytest.raises(ValueError, match="pollux does not take these options"):
        by_name("pollux", p=1.0)
    with pytest.raises(ValueError, match=r"policy \('best'\) must be one of fifo, tiresias"):
        by_name("best")
