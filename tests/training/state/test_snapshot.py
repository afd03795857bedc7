"""Taking states apart and putting them together: everything goes through real JSON on the way."""

import itertools
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim
from torch.optim import lr_scheduler

from resilin.training.state.shards import shares
from resilin.training.state.snapshot import Snapshot, Version, join, split
from tests.examples import examples

Pair = namedtuple("Pair", "a b")


def round_trip(state):
    tree, tensors = split("x", state)
    # Strict JSON, as other readers than Python's understand it: no NaN, no Infinity.
    return join(json.loads(json.dumps(tree, allow_nan=False)), tensors)


def same(a, b):
    """Whether two states are equal in values, types and order, bit for bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and _raw(a) == _raw(b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (
            a == b and math.copysign(1, a) == math.copysign(1, b)
        )
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(p, q) for p, q in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, deque) and a.maxlen != b.maxlen:
        return False
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def _raw(tensor):
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


@pytest.mark.parametrize(
    "state",
    [
        None,
        True,
        -0.0,
        5e-324,
        0.1,
        float("nan"),
        float("-inf"),
        2**80,
        "",
        "\ud800 \x00 \u2028",
        b"\x00\xff",
        torch.bfloat16,
        torch.Size([2, 0]),
        [],
        (),
        {},
        set(),
        ((), [()], ([], {}), {"a": ()}),
        pytest.param({3, "a", (1, None)}, id="set"),
        deque([1, (2,)]),
        OrderedDict([("b", 1), ("a", {"c": 2})]),
        Counter({3: 2, 30: -1}),
        {1: "int", "1": "str", None: 0, (1, (2.5, None)): [], 2.5: (), False: 1},
        {"$": "tensor", "of": "x"},
        {"$": {"$": {"$": "dtype", "of": "load"}}},
        [{"of": "x"}, {"$of": 1}],
    ],
    ids=repr,
)
def test_what_json_has_no_form_for_comes_back_as_it_was(state):
    assert same(round_trip(state), state)
    assert same(round_trip({"deep": [(state,)]}), {"deep": [(state,)]})


def test_a_bounded_deque_stays_bounded():
    again = round_trip(deque([1, 2, 3], maxlen=3))
    again.append(4)
    assert list(again) == [2, 3, 4]


@pytest.mark.parametrize(
    ("state", "plain"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(-3), -3),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (np.bytes_(b"a"), b"a"),
        (np.float64("inf"), math.inf),
        (defaultdict(list, a=[1]), {"a": [1]}),
        (MappingProxyType({"a": 1}), {"a": 1}),
        (Pair(1, "b"), (1, "b")),
    ],
    ids=repr,
)
def test_relatives_of_plain_types_come_back_plain(state, plain):
    assert same(round_trip(state), plain)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3)[:, ::-1],
        np.arange(6).reshape(2, 3).T,
        np.array(3.5),
        np.empty((0, 3), dtype=np.float16),
        np.array([True, False]),
        np.array([2**64 - 1], dtype=np.uint64),
        np.array([1j], dtype=np.complex64),
        np.frombuffer(b"read-only", dtype=np.uint8),
        np.random.default_rng(0).bit_generator.random_raw(4),
    ],
    ids=lambda a: f"{a.dtype}{list(a.shape)}",
)
def test_arrays_of_numpy(array):
    again = round_trip({"a": array})["a"]
    assert same(again, np.ascontiguousarray(array).reshape(array.shape))
    again[...] = 0  # It is one's own, and can be written to.


def test_an_array_that_was_taken_back_is_not_that_of_the_snapshot():
    tree, tensors = split("x", np.zeros(3))
    join(tree, tensors)[:] = 1
    assert tensors["x"].tolist() == [0, 0, 0]


def test_states_of_random_generators():
    legacy = np.random.RandomState(3)
    state = round_trip(legacy.get_state(legacy=False))
    expected = legacy.random_sample(5)
    other = np.random.RandomState(4)
    other.set_state(state)
    assert (other.random_sample(5) == expected).all()
    generator = np.random.default_rng(5)
    state = round_trip(generator.bit_generator.state)
    expected, generator = generator.random(5), np.random.default_rng(6)
    generator.bit_generator.state = state
    assert (generator.random(5) == expected).all()
    before = torch.Generator().manual_seed(7)
    after = torch.Generator()
    after.set_state(round_trip(before.get_state()))
    assert torch.rand(3, generator=after).equal(torch.rand(3, generator=before))


@pytest.mark.parametrize(
    ("first", "second"),
    [("a.b", ("a", "b")), (1, "1"), (None, "None"), (True, "True"), (1.0, "1.0"), ((1,), "(1,)")],
)
def test_keys_that_look_alike_do_not_share_a_tensor(first, second):
    one, two = torch.tensor([1.0]), torch.tensor([2.0])
    inner = {second[1]: two} if isinstance(second, tuple) else two
    outer = second[0] if isinstance(second, tuple) else second
    for state in ({first: one, outer: inner}, {outer: inner, first: one}):
        assert same(round_trip(state), state)
        assert len(split("x", state)[1]) == 2


def test_many_keys_of_one_path_and_those_that_resemble_the_way_out():
    state = {
        "a": {"b.c": torch.tensor(1), "b": {"c": torch.tensor(2)}, "b.c#1": torch.tensor(3)},
        "a.b": {"c": torch.tensor(4), "c#1": torch.tensor(5)},
        "a.b.c": torch.tensor(6),
        "a.b.c#2": torch.tensor(7),
    }
    tree, tensors = split("x", state)
    assert sorted(int(t) for t in tensors.values()) == list(range(1, 8))
    assert same(join(json.loads(json.dumps(tree)), tensors), state)
    # Every replica names them alike, or their shares would differ.
    assert list(split("x", state)[1]) == list(tensors)


class Code:
    def __reduce__(self):
        raise AssertionError("nothing here pickles")


@pytest.mark.parametrize(
    ("state", "path"),
    [
        (Code(), "x is a .*Code"),
        ({"a": [1, {"b": Code()}]}, r"x\.a\.1\.b is a .*Code"),
        ([(lambda: 0,)], r"x\.0\.0 is a builtins\.function"),
        ({"d": torch.device("cpu")}, r"x\.d is a torch\.device"),
        ({"c": 1j}, r"x\.c is a builtins\.complex"),
        ({"r": range(3)}, r"x\.r is a builtins\.range"),
        ({"t": np.datetime64(1, "s")}, r"x\.t is a datetime"),
        ({"o": np.array([Code()], dtype=object)}, r"x\.o is a numpy\.ndarray"),
        ({"s": np.array(["a"])}, r"x\.s "),
        ({"v": np.zeros(2, dtype=[("f", int)])}, r"x\.v "),
        ({"e": np.arange(3, dtype=">i4")}, r"x\.e "),
        ({"p": torch.eye(2).to_sparse()}, r"x\.p "),
        ({"k": {b"a": 1}}, r"x\.k has the key b'a' of type bytes"),
        ({"k": {Code: 1}}, r"x\.k has the key .* of type type"),
        ({"k": {(1, Code): 1}}, r"x\.k.* is a builtins\.type"),
        (type, "x is a builtins.type"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_saved_is_refused_with_its_place(state, path):
    with pytest.raises(ValueError, match=path):
        split("x", state)


@pytest.mark.parametrize(
    "tree",
    [
        {"$": "eval", "of": "1"},
        {"$": None},
        {"$": []},
        {"$": {}},
        {"$": "float"},
        {"$": "float", "of": "one"},
        {"$": "float", "of": {}},
        {"$": "bytes", "of": 3},
        {"$": "bytes", "of": "a"},
        {"$": "dtype", "of": "load"},
        {"$": "dtype", "of": "nn.Linear"},
        {"$": "dtype", "of": "__class__"},
        {"$": "dtype"},
        {"$": "tensor"},
        {"$": "tensor", "of": "gone"},
        {"$": "tensor", "of": ["t"]},
        {"$": "array", "of": {}},
        {"$": "tuple", "of": 5},
        {"$": "set", "of": [[1]]},
        {"$": "size", "of": ["a"]},
        {"$": "dict", "of": [1]},
        {"$": "dict", "of": [["a", 1, 2]]},
        {"$": "dict", "of": [[[1], 2]]},
        {"$": "ordered", "of": 7},
    ],
    ids=json.dumps,
)
def test_a_tree_that_split_did_not_make_is_refused(tree):
    for wrapped in (tree, [tree], {"a": {"b": tree}}):
        with pytest.raises(ValueError):  # noqa: PT011 - that it is this type is the promise
            join(wrapped, {"t": torch.ones(1)})


OPTIMIZERS = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: optim.Adam(p, lr=torch.tensor(0.1), amsgrad=True),
    "AdamW": lambda p: optim.AdamW(p, betas=(0.8, 0.99)),
    "Adagrad": optim.Adagrad,
    "RMSprop": lambda p: optim.RMSprop(p, momentum=0.5, centered=True),
    "Adadelta": optim.Adadelta,
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "Rprop": optim.Rprop,
    "ASGD": optim.ASGD,
    "LBFGS": lambda p: optim.LBFGS(p, max_iter=2, history_size=3),
}


def trained(make, steps, state=None, seed=0):
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters())
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for _ in range(steps):

        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(4, 3)).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_on_as_if_nothing_had_been(name):
    make = OPTIMIZERS[name]
    state = trained(make, 3)
    again = round_trip(state)
    assert type(again["model"]) is OrderedDict
    assert same(again["optimizer"], state["optimizer"])
    expected = trained(make, 2, state=trained(make, 3))
    assert same(trained(make, 2, state=again, seed=9)["model"], expected["model"])


def warm_up_and_decay(optimizer):
    return lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
            lr_scheduler.CosineAnnealingLR(optimizer, T_max=10),
        ],
        milestones=[3],
    )


class Doubling:
    """A schedule with a state of its own, which LambdaLR saves as a dict."""

    def __init__(self):
        self.base = 2.0

    def __call__(self, step):
        return self.base**step


SCHEDULERS = {
    "sequential": warm_up_and_decay,
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=20),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "multi step": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 6], gamma=0.5),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3, T_mult=2),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.1, 1.0, step_size_up=3, mode="exp_range"),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "callable": lambda o: lr_scheduler.LambdaLR(o, Doubling()),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 9, power=2.0),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 4), lr_scheduler.ExponentialLR(o, 0.9)], o
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_goes_on_as_if_nothing_had_been(name):
    def make():
        optimizer = optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0, momentum=0.9)
        return optimizer, SCHEDULERS[name](optimizer)

    def rates(optimizer, scheduler, steps):
        seen = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step(*([1.0] if name == "plateau" else []))
            seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        return seen

    optimizer, scheduler = make()
    rates(optimizer, scheduler, 4)
    state = {"o": optimizer.state_dict(), "s": scheduler.state_dict()}
    again = round_trip(state)
    assert same(again["s"], state["s"])
    expected = rates(optimizer, scheduler, 8)
    optimizer, scheduler = make()
    optimizer.load_state_dict(again["o"])
    scheduler.load_state_dict(again["s"])
    assert rates(optimizer, scheduler, 8) == expected


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.uint16]
)
def test_tensors_are_those_of_the_state_and_not_copies(dtype):
    whole = torch.zeros(4, 4).to(dtype)
    state = {"t": whole.t()[1:], "zero": whole[0, 0], "empty": whole[:0]}
    tree, tensors = split("x", state)
    assert same(join(tree, tensors), state)
    assert tensors["x.t"].data_ptr() == state["t"].data_ptr()
    parameter = nn.Parameter(torch.ones(2))
    assert not split("x", parameter)[1]["x"].requires_grad


numbers = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
keys = st.recursive(
    st.text(max_size=3) | st.integers(-3, 3) | st.booleans() | st.none() | st.floats(-2, 2),
    lambda inner: st.tuples(inner, inner),
    max_leaves=3,
)
tensors_of_any_kind = st.builds(
    lambda shape, dtype, seed: torch.randint(
        0, 2, shape, generator=torch.Generator().manual_seed(seed)
    ).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.bool, torch.bfloat16, torch.int64, torch.complex64]),
    st.integers(0, 9),
)
states = st.recursive(
    numbers | tensors_of_any_kind | tensors_of_any_kind.filter(lambda t: t.dtype.itemsize != 2),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.lists(inner, max_size=4).map(deque)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(st.sampled_from(["a", "b", "a.b", "$", "of", "#1"]), inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=12,
)


@examples(100, derandomize=True)
@given(states)
def test_any_state_comes_back_as_it_was(state):
    assert same(round_trip(state), state)


json_values = st.recursive(
    st.none() | st.integers() | st.text(max_size=3) | st.sampled_from(["tensor", "dict", "tuple"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$", "of", "a"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@examples(150, derandomize=True)
@given(json_values)
def test_any_json_is_either_a_state_or_a_value_error(tree):
    try:
        join(tree, {})
    except ValueError:
        return


@examples(100, derandomize=True)
@given(st.dictionaries(st.text(max_size=4), st.integers(0, 50), max_size=12), st.integers(1, 5))
def test_shares_are_a_fair_deal_that_does_not_depend_on_order(sizes, num):
    tensors = {name: torch.empty(size, dtype=torch.uint8) for name, size in sizes.items()}
    dealt = shares(tensors, num)
    assert len(dealt) == num
    assert sorted(name for names in dealt for name in names) == sorted(tensors)
    assert shares(dict(reversed(tensors.items())), num) == dealt
    loads = [sum(sizes[name] for name in names) for names in dealt]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)


def test_versions_order_by_generation_then_step_then_epoch():
    ordered = [Version(0, 9, 9), Version(1, 0), Version(1, 2, 0), Version(1, 2, 1), Version(2, 1)]
    assert all(early < late for early, late in itertools.combinations(ordered, 2))
    assert str(Version(2, 7, 1)) == "step 7 of generation 2"


def test_a_snapshot_knows_its_size_and_hides_its_tensors():
    tree, tensors = split("m", {"w": torch.ones(3), "b": torch.ones(2, dtype=torch.bfloat16)})
    snapshot = Snapshot(Version(0, 1), {"m": tree}, tensors)
    assert snapshot.num_bytes == 16
    assert "tensor(" not in repr(snapshot)
    assert snapshot.state("m")["w"] is tensors["m.w"]


def adam(lr=0.1, num=3, **more):
    """A state as an optimizer has it."""
    state = {i: {"step": torch.tensor(float(i)), "exp_avg": torch.ones(i + 1)} for i in range(num)}
    return {"state": state, "param_groups": [{"lr": lr, "params": list(range(num))}], **more}


ORDERED = OrderedDict(a=torch.ones(2), b=torch.zeros(1))
CHANGING = [
    [adam(), adam(lr=0.2), adam(num=4), adam(num=2), adam(num=2, lr=float("nan"))],
    [ORDERED, dict(ORDERED), OrderedDict(reversed(ORDERED.items())), ORDERED],
    [{1: torch.ones(1)}, {True: torch.ones(1)}, {1.0: torch.ones(1)}, {1: torch.ones(1)}],
    [{"x": torch.ones(2)}, {"x": 3}, {"x": np.ones(2)}, {"x": None}, {"x": torch.ones(2)}],
    [{"x": torch.ones(2)}, {"x": torch.ones(3).half()}, {"x": torch.ones(2, requires_grad=True)}],
    [{"$": torch.ones(1)}, {"x": {}}, {}, {"x": {"y": torch.ones(1)}}, {"x": {}}],
    # Keys with dots make the same path twice: the first of them has the name.
    [
        {"a.b": {"c": torch.ones(1)}, "a": {"b": {"c": torch.zeros(1)}}},
        {"a": {"b": {"c": torch.zeros(1)}}, "a.b": {"c": torch.ones(1)}},
        {"a": {"b": {"c": torch.zeros(1)}}},
        {"a.b.c": torch.full((1,), 5.0), "a": {"b": {"c": torch.zeros(1)}}},
    ],
]


@pytest.mark.parametrize("states", CHANGING, ids=range(len(CHANGING)))
def test_what_is_remembered_of_a_state_changes_nothing(states):
    for order in itertools.product(states, repeat=3):
        branches = {}
        for state in order:
            tree, tensors = split("m", state, {"other": torch.ones(1)}, branches)
            fresh, expected = split("m", state, {"other": torch.ones(1)})
            assert json.dumps(tree) == json.dumps(fresh)
            assert list(tensors) == list(expected)
            for name, tensor in tensors.items():
                assert tensor is expected[name] or tensor.equal(expected[name])
                assert not tensor.requires_grad


def test_a_name_that_somebody_else_has_is_not_taken_from_memory():
    branches = {}
    state = {"x": torch.ones(1)}
    split("m", state, {}, branches)
    other = {"m.x": torch.zeros(1)}
    tree, tensors = split("m", state, dict(other), branches)
    assert (tree, set(tensors)) == split_names("m", state, other)
    assert tensors["m.x"].item() == 0


def split_names(name, state, others):
    tree, tensors = split(name, state, dict(others))
    return tree, set(tensors)


def test_the_tree_of_tensors_that_stay_is_the_same_object():
    branches = {}
    first, _ = split("o", adam(), {}, branches)
    second, _ = split("o", adam(lr=0.3), {}, branches)
    assert second["state"] is first["state"]
    assert second["param_groups"] != first["param_groups"]
