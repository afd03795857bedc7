"""What of an object is kept, what is the script's, and what is named because it cannot be kept."""

import collections
import json
import random
import warnings

import numpy as np
import pytest
import torch

from resilin.integrations import memory
from resilin.integrations.memory import Memory
from resilin.training.state.snapshot import join, split


class Helper:
    def __init__(self):
        self.num = 0


class Thing:
    """As a script makes it: with settings, and with things to remember."""

    def __init__(self, patience=3, limit=10):
        self.patience, self.limit = patience, limit
        self.best = float("nan")
        self.rows = np.zeros(3)
        self.weights = torch.ones(2)
        self.names = []
        self.counts = collections.Counter()
        self.sums = collections.defaultdict(list)
        self.recent = collections.deque([1], maxlen=2)
        self.seen = {1}
        self.helper = Helper()
        self.dice = random.Random(1)
        self.generator = torch.Generator().manual_seed(2)
        self.old = np.random.RandomState(3)
        self.data = np.arange(memory.LARGE + 1)
        self.later = None
        self.made = None

    def begin(self):
        self.best, self.made = 0.0, Helper()

    def train(self):
        self.best = 0.5
        self.rows += 2
        self.weights *= 3
        self.names += [["a", 1], ("b", None)]
        self.counts["x"] += 4
        self.sums["y"].append(1.5)
        self.recent += [2, 3]
        self.seen.add(2)
        self.helper.num += 5
        self.made.num += 6
        self.dice.random()
        torch.rand(1, generator=self.generator)
        self.old.rand()
        self.later = b"bytes"
        self.losses = [0.25] * 100

    def draws(self):
        drawn = torch.rand(1, generator=self.generator).item()
        return [self.dice.random(), drawn, self.old.rand()]


def travel(taken):
    """As through a state that is written and read."""
    tree, tensors = split("callback", taken)
    return join(json.loads(json.dumps(tree)), tensors)


def test_what_has_changed_survives_and_settings_are_those_of_the_script():
    thing = Thing()
    kept = Memory(thing)
    thing.begin()
    thing.train()
    taken = travel(kept.take())
    assert not {"patience", "limit", "data"} & set(taken["plain"])
    again = Thing(patience=7)
    given = Memory(again)
    again.begin()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        given.give(taken, "Thing")
    assert (again.patience, again.best, again.later) == (7, 0.5, b"bytes")
    assert again.rows.tolist() == [2, 2, 2]
    assert again.weights.tolist() == [3, 3]
    assert again.names == [["a", 1], ("b", None)]
    assert again.counts == {"x": 4}
    assert type(again.counts) is collections.Counter
    assert again.sums["y"] == [1.5]
    assert again.sums["new"] == []
    assert again.recent == collections.deque([2, 3])
    assert again.recent.maxlen == 2
    assert again.seen == {1, 2}
    assert (again.helper.num, again.made.num) == (5, 6)
    assert again.losses == [0.25] * 100
    assert again.draws() == thing.draws()
    # Kept once more, as it would be after another restart.
    assert travel(given.take())["plain"].keys() == taken["plain"].keys()


def test_what_hooks_have_done_to_an_unchanged_attribute_is_undone():
    thing = Thing()
    taken = travel(Memory(thing).take())
    again = Thing()
    given = Memory(again)
    again.limit, again.best = 0, 1.0
    given.give(taken, "Thing")
    assert again.limit == 10
    assert np.isnan(again.best)


def test_what_has_methods_for_its_state_is_asked():
    class Asked:
        def __init__(self):
            self.num = 0

        def state_dict(self):
            return {"half": self.num // 2}

        def load_state_dict(self, state):
            self.num = 2 * state["half"]

    one, other = Asked(), Asked()
    one.num = 9
    Memory(other).give(travel(Memory(one).take()), "Asked")
    assert other.num == 8


def test_what_cannot_be_kept_is_named_unless_it_was_made_anew():
    thing = Thing()
    kept = Memory(thing)
    thing.later, thing.made = iter([1, 2]), object()
    taken = travel(kept.take())
    again = Thing()
    given = Memory(again)
    again.made = object()
    with pytest.warns(UserWarning, match=r"Thing\.later \(a list_iterator\) has changed") as said:
        given.give(taken, "Thing")
    assert len(said) == 1
