import gc
import warnings
import weakref

import pytest
import torch
from torch import nn

from resilin.training.state.registry import Registry
from resilin.training.state.replica_parts import add_up, gathered, of_process
from resilin.training.state.snapshot import Snapshot, Version

NOW = Version(1, 7)


class Thing:
    """Something with state; remembers what it was given."""

    def __init__(self, state=None):
        self.state = state
        self.loaded = []

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.loaded.append(state)
        self.state = state


class Sums(Thing):
    """What each replica has a part of."""

    def state_dict(self):
        return {"sums": self.state}

    def load_state_dict(self, state):
        super().load_state_dict(state["sums"])


def registry_of(**things):
    registry = Registry()
    for name, thing in things.items():
        registry.add(name, thing)
    return registry


def snapshot_of(**states):
    return registry_of(**{name: Thing(state) for name, state in states.items()}).take(NOW)


def test_what_was_taken_is_given_back():
    model = nn.Linear(2, 1)
    snapshot = registry_of(model=model, mine=Thing({"n": 3, "t": torch.ones(2)})).take(NOW)
    assert (snapshot.version, sorted(snapshot.tree)) == (NOW, ["mine", "model"])
    assert sorted(snapshot.tensors) == ["mine.t", "model.bias", "model.weight"]
    # Not copied: whoever keeps it copies it to where it keeps it.
    assert snapshot.tensors["model.weight"].data_ptr() == model.weight.data_ptr()
    other, mine = nn.Linear(2, 1), Thing()
    registry_of(model=other, mine=mine).restore(snapshot, first_replica=True)
    assert other.weight.equal(model.weight)
    assert mine.state["n"] == 3
    assert len(mine.loaded) == 1


def test_what_is_registered_late_gets_its_state_at_once():
    registry = registry_of(early=Thing())
    snapshot = snapshot_of(early=1, late={"t": torch.arange(3)}, later=torch.ones(1))
    registry.restore(snapshot, first_replica=True)
    late, later = Thing(), Thing()
    registry.add("late", late)
    assert late.state["t"].tolist() == [0, 1, 2]
    registry.add("later", later)
    assert later.state.tolist() == [1.0]
    assert sorted(registry.take(NOW).tree) == ["early", "late", "later"]
    # Registering it again changes nothing, and what is new under a used name begins anew.
    registry.add("late", late)
    assert len(late.loaded) == 1
    registry.remove("late")
    registry.remove("nothing")
    again = Thing("new")
    registry.add("late", again)
    assert again.loaded == []


def test_the_snapshot_of_whoever_restores_is_left_as_it_was():
    snapshot = snapshot_of(a={"t": torch.ones(1)}, b={"t": torch.ones(1)})
    registry_of(a=Thing()).restore(snapshot, first_replica=True)
    assert sorted(snapshot.tensors) == ["a.t", "b.t"]


def test_names_that_begin_alike_do_not_take_each_others_tensors():
    first, second = Thing({"b": {"t": torch.tensor(1)}}), Thing({"t": torch.tensor(2)})
    registry = Registry()
    registry.add("a", first)
    registry.add("a.b", second)
    snapshot = registry.take(NOW)
    assert len(snapshot.tensors) == 2
    assert snapshot.state("a")["b"]["t"] == 1
    assert snapshot.state("a.b")["t"] == 2


def test_claiming_a_name_leaves_the_tensors_of_one_that_begins_with_it():
    snapshot = Snapshot(
        NOW,
        {"ema": {"$": "tensor", "of": "ema"}, "ema.slow": {"$": "tensor", "of": "ema.slow"}},
        {"ema": torch.tensor(1), "ema.slow": torch.tensor(2)},
    )
    registry, slow = registry_of(ema=Thing()), Thing()
    registry.restore(snapshot, first_replica=True)
    registry.add("ema.slow", slow)
    assert slow.state == 2


def test_a_name_that_begins_with_model_is_not_taken_for_a_part_of_it():
    things = {"model": nn.Linear(2, 1), "model.ema": Thing({"weight": torch.ones(1)})}
    snapshot = registry_of(**things).take(NOW)
    model = nn.Linear(2, 1)
    registry_of(model=model).restore(snapshot, first_replica=True)
    assert model.weight.equal(things["model"].weight)


def test_what_nobody_claims_is_warned_of_once():
    registry = registry_of(a=Thing())
    registry.restore(snapshot_of(a=1, gone=2, lost=3), first_replica=True)
    with pytest.warns(UserWarning, match="a state with 'gone', 'lost', which nothing"):
        registry.warn_of_unclaimed()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        registry.warn_of_unclaimed()


def test_sums_that_nobody_claims_are_no_reason_to_warn():
    registry = registry_of(a=Thing())
    tree = {"a": 1, "sums/epoch 3/0": {"n": 2.0}}
    registry.restore(Snapshot(NOW, tree, {}), first_replica=True)
    registry.warn_of_unclaimed()


def test_what_is_missing_from_the_state_is_warned_of_and_begins_anew():
    new = Thing("new")
    with pytest.warns(UserWarning, match=r"'new' is not in the state .*step 7 of generation 1"):
        registry_of(a=Thing(), new=new).restore(snapshot_of(a=1), first_replica=True)
    assert new.loaded == []


@pytest.mark.parametrize(
    ("name", "thing", "message"),
    [
        ("", Thing(), "'' cannot be a name"),
        (" a", Thing(), "' a' cannot be a name"),
        ("sums/a", Thing(), "'sums/a' cannot be a name: .* begin with sums/ or own/"),
        ("taken", Thing(), "'taken' is registered already, for a Thing"),
        ("dict", {}, r"'dict' is a dict without state_dict\(\)"),
    ],
)
def test_what_cannot_be_registered(name, thing, message):
    registry = registry_of(taken=Thing())
    with pytest.raises(ValueError, match=message):
        registry.add(name, thing)
    assert list(registry.take(NOW).tree) == ["taken"]


def test_what_can_only_be_saved_cannot_be_registered():
    half = Thing()
    half.load_state_dict = None
    with pytest.raises(ValueError, match=r"without load_state_dict\(\)"):
        Registry().add("half", half)


def test_a_state_that_cannot_be_saved_is_named():
    with pytest.raises(ValueError, match=r"mine\.f\.0 is a builtins\.function"):
        registry_of(mine=Thing({"f": [lambda: 0]})).take(NOW)


def test_a_thing_that_fails_to_load_can_be_registered_again():
    registry = Registry()
    registry.restore(snapshot_of(a=5), first_replica=True)
    broken, whole = Thing(), Thing()
    broken.load_state_dict = lambda state: 1 / 0
    with pytest.raises(ZeroDivisionError):
        registry.add("a", broken)
    registry.add("a", whole)
    assert whole.state == 5


def test_a_thing_may_register_others_while_it_is_restored():
    registry, child = Registry(), Thing()

    class Parent(Thing):
        def load_state_dict(self, state):
            registry.add("child", child)

    registry.add("parent", Parent())
    registry.restore(snapshot_of(parent=1, child=2), first_replica=True)
    assert child.loaded == [2]


DIFFERENT = {
    "shape": (nn.Linear(3, 1), r"weight was \(1, 2\) torch.float32 and is \(1, 3\) torch.float32"),
    "type": (nn.Linear(2, 1).double(), "bias was .* torch.float32 and is .* torch.float64"),
    "fewer": (nn.Linear(2, 1, bias=False), "bias is in it and not in the model"),
    "more": (nn.ModuleDict({"m": nn.Linear(2, 1)}), "m.bias is missing from it"),
}


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("how", DIFFERENT)
def test_the_state_of_another_model_is_refused_before_anything_is_loaded(how, late):
    model, message = DIFFERENT[how]
    snapshot = registry_of(optimizer=Thing(1), model=nn.Linear(2, 1)).take(NOW)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    optimizer, registry = Thing(), Registry()
    if late:
        registry.restore(snapshot, first_replica=True)
    else:
        registry.add("optimizer", optimizer)
        registry.add("model", model)
    with pytest.raises(ValueError, match=f"step 7 of generation 1.*another model: .*{message}"):
        registry.add("model", model) if late else registry.restore(snapshot, first_replica=True)
    assert optimizer.loaded == []
    assert all(t.equal(before[name]) for name, t in model.state_dict().items())


def test_at_most_five_differences_are_told():
    deep = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    snapshot = registry_of(model=deep).take(NOW)
    with pytest.raises(ValueError, match=r"and 3 more$"):
        registry_of(model=nn.Sequential()).restore(
            Snapshot(NOW, snapshot.tree, snapshot.tensors), first_replica=True
        )


def test_sums_are_named_by_where_and_in_which_order_they_were_made():
    registry = Registry()
    first, second, third = Sums({"n": 1.0}), Sums({"n": 2.0}), Sums({("a", 1): 3.0})
    registry.add_summed("start", first, first_replica=True)
    registry.add_summed("start", second, first_replica=True)
    registry.add_summed("epoch 1", third, first_replica=True)
    taken = registry.take_sums()
    assert sorted(taken) == ["sums/epoch 1/0", "sums/start/0", "sums/start/1"]
    assert taken["sums/start/1"] == {"n": 2.0}
    del second
    gc.collect()
    assert sorted(registry.take_sums()) == ["sums/epoch 1/0", "sums/start/0"]
    assert registry.take(NOW).tree == {}


def test_parts_of_sums_add_up_key_by_key():
    parts = []
    for sums in ({"n": 1.0, 2: 5.0}, {"n": 2.0, (1, "x"): 1.5}, {}):
        registry, thing = Registry(), Sums(sums)
        registry.add_summed("start", thing, first_replica=True)
        parts.append(registry.take_sums())
    total = add_up([*parts, {}])
    whole, rest = Sums(), Sums()
    for thing, first in ((whole, True), (rest, False)):
        registry = Registry()
        registry.add_summed("start", thing, first_replica=first)
        registry.restore(Snapshot(NOW, total, {}), first_replica=first)
    assert whole.state == {"n": 3.0, 2: 5.0, (1, "x"): 1.5}
    # Over all replicas it is what it was: one has the whole, the others nothing.
    assert rest.state == {}
    assert add_up([]) == {}


def test_sums_that_are_made_late_get_theirs_at_once_and_only_once():
    registry = registry_of(a=Thing())
    tree = {"a": 1, "sums/start/1": {"n": 4.0}}
    registry.restore(Snapshot(NOW, tree, {}), first_replica=True)
    made = [Sums({}) for _ in range(3)]
    for thing in made:
        registry.add_summed("start", thing, first_replica=True)
    assert [thing.loaded for thing in made] == [[], [{"n": 4.0}], []]


def test_infinite_and_missing_numbers_survive_in_sums():
    total = add_up([{"sums/a/0": {"n": {"$": "float", "of": "inf"}}}, {"sums/a/0": {"n": 1.0}}])
    assert total == {"sums/a/0": {"n": {"$": "float", "of": "inf"}}}


def test_the_tensors_of_what_was_claimed_are_let_go():
    registry, thing = Registry(), Thing()
    snapshot = snapshot_of(a={"t": torch.ones(8)}, gone={"t": torch.ones(1)})
    tensor = weakref.ref(snapshot.tensors["a.t"])
    registry.restore(snapshot, first_replica=True)
    del snapshot
    registry.add("a", thing)
    thing.state = None
    thing.loaded.clear()
    gc.collect()
    assert tensor() is None


# What nobody has claimed yet -----------------------------------------------------------------


def test_restored_state_is_taken_again_until_somebody_claims_it():
    registry = registry_of(a=Thing())
    snapshot = snapshot_of(a=1, late={"t": torch.arange(3)})
    registry.restore(snapshot, first_replica=True)
    again = registry.take(Version(2, 7))
    assert again.tree["late"] == snapshot.tree["late"]
    assert again.state("late")["t"].tolist() == [0, 1, 2]
    late = Thing()
    registry.add("late", late)
    late.state = {"t": torch.arange(4)}
    assert registry.take(Version(2, 8)).state("late")["t"].tolist() == [0, 1, 2, 3]


def test_restored_tensors_keep_their_names_beside_new_ones_of_the_same_name():
    registry = Registry()
    snapshot = registry_of(**{"a.b": Thing({"t": torch.tensor(1)})}).take(NOW)
    registry.restore(snapshot, first_replica=True)
    registry.add("a", Thing({"b": {"t": torch.tensor(2)}}))
    again = registry.take(NOW)
    assert again.state("a.b")["t"] == 1
    assert again.state("a")["b"]["t"] == 2


def test_what_is_registered_after_steps_were_made_says_what_it_misses():
    """An average that is made after the first evaluation, in each run of the script."""
    clock = [7]
    registry = Registry(lambda: clock[0])
    registry.restore(snapshot_of(ema=1, other=2), first_replica=True)
    clock[0] = 12
    with pytest.warns(UserWarning, match=r"'ema' was registered at step 12 .* state at step 7"):
        registry.add("ema", Thing())
    # One that is not registered at all in one run is as old in the next.
    snapshot = registry.take(Version(2, 12))
    after = Registry(lambda: 12)
    after.restore(snapshot, first_replica=True)
    with pytest.warns(UserWarning, match=r"'other' was registered at step 12 .* state at step 7"):
        after.add("other", Thing())
    after.add("ema", Thing())
    assert sorted(after.take(Version(3, 13)).tree) == ["ema", "other"]


def test_what_steps_do_not_change_may_be_registered_at_any_time():
    for early in (False, True):
        registry, loader = Registry(lambda: 12), Thing()
        if early:
            registry.add("loader", loader, ages=False)
        snapshot = snapshot_of(loader=5)
        tree = {**snapshot.tree, "sums/ages": {"loader": 7}}
        registry.restore(Snapshot(Version(1, 12), tree, {}), first_replica=True)
        registry.add("loader", loader, ages=False)
        assert loader.loaded == [5]


def test_what_is_removed_is_not_kept_even_if_it_was_restored():
    registry = registry_of(a=Thing())
    registry.restore(snapshot_of(a=1, b={"t": torch.ones(1)}), first_replica=True)
    registry.remove("b")
    taken = registry.take(NOW)
    assert (sorted(taken.tree), taken.tensors) == (["a"], {})


def test_what_is_released_stays_until_another_takes_its_place():
    first, second = Thing({"t": torch.ones(1)}), Thing(2)
    registry = registry_of(model=nn.Linear(1, 1), optimizer=first)
    for name in ("model", "optimizer", "unknown"):
        registry.release(name)
    assert sorted(registry.take(NOW).tree) == ["model", "optimizer"]
    registry.add("optimizer", second)
    assert registry.take(NOW).state("optimizer") == 2
    with pytest.raises(ValueError, match="'optimizer' is registered already"):
        registry.add("optimizer", first)
    # What is restored is newer than what was released.
    registry.restore(snapshot_of(model={"other": torch.ones(2)}, optimizer=3), first_replica=True)
    assert registry.take(NOW).state("model")["other"].tolist() == [1, 1]
    registry.release("optimizer")
    registry.remove("model")
    registry.add("model", Thing(4))
    assert registry.take(NOW).tree == {"model": 4}


def test_sums_that_nobody_claims_stay_with_one_replica_until_their_epoch_is_over():
    tree = {"sums/start/0": {"n": 1.0}, "sums/epoch 3/0": {"n": 2.0}}
    first, second = Registry(), Registry()
    first.restore(Snapshot(NOW, tree, {}), first_replica=True)
    second.restore(Snapshot(NOW, tree, {}), first_replica=False)
    assert add_up([first.take_sums(3), second.take_sums(3)]) == tree
    assert add_up([first.take_sums(4), second.take_sums(4)]) == {"sums/start/0": {"n": 1.0}}


# What each replica has its own of ------------------------------------------------------------


def own_of(state):
    registry = Registry()
    registry.add_own("random", Thing(state))
    return registry.take_own()


def whole(states, replicas=None):
    """A snapshot with what each of these replicas has of its own."""
    own = gathered({i: own_of(state) for i, state in enumerate(states)})
    job = {"replicas": len(states) if replicas is None else replicas}
    return Snapshot(NOW, {"job": job, **own.tree}, own.tensors)


def test_each_replica_gets_back_its_own():
    snapshot = whole([{"t": torch.full((2,), i), "n": i} for i in range(3)])
    for replica in range(3):
        early, late = Thing(), Thing()
        registry = Registry()
        registry.add_own("random", early)
        registry.restore(of_process(snapshot, replica, 3), first_replica=replica == 0)
        assert (early.state["n"], early.state["t"].tolist()) == (replica, [replica] * 2)
        other = Registry()
        other.restore(of_process(snapshot, replica, 3), first_replica=replica == 0)
        # Not lost before it is claimed, and no part of what all replicas share.
        assert sorted(other.take(NOW).tree) == ["job"]
        assert other.take(NOW).tensors == {}
        again = gathered({replica: other.take_own()})
        assert again.tensors[f"own/{replica}/random.t"].tolist() == [replica] * 2
        other.add_own("random", late)
        assert late.state["n"] == replica
        assert other.take_own().tree["own/random"]["n"] == replica


@pytest.mark.parametrize("before", [1, 3])
def test_at_another_number_of_replicas_nobody_has_its_own_any_more(before):
    early, late, registry = Thing("new"), Thing("new"), Registry()
    registry.add_own("early", early)
    assert early.loaded == []  # nothing was restored so far
    snapshot = of_process(whole([{"n": i} for i in range(before)]), 0, 2)
    registry.restore(snapshot, first_replica=True)
    registry.add_own("random", late)
    assert (early.loaded, late.loaded) == ([None], [None])
    assert snapshot.tensors == {}


def test_own_names_are_apart_from_shared_ones_and_taken_once():
    registry, thing = registry_of(random=Thing(1)), Thing(2)
    registry.add_own("random", thing)
    registry.add_own("random", thing)
    with pytest.raises(ValueError, match="'random' is registered already"):
        registry.add_own("random", Thing())
    with pytest.raises(ValueError, match="'own/x' cannot be a name"):
        registry.add("own/x", Thing())
    assert registry.take_own().tree == {"own/random": 2}
    registry.remove("random")
    assert (registry.take_own().tree, registry.take(NOW).tree) == ({}, {})
