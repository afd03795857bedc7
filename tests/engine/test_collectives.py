"""What processes tell each other: in JSON and raw bytes, with one outcome for all of them."""

import pickle
from typing import ClassVar

import pytest
import torch

from resilin.engine import collectives
from resilin.engine.collectives import Collectives, Outcome, State, Wire
from resilin.engine.group import detect
from resilin.engine.single import Single


def peers():
    return detect().collectives()


def test_one_process_agrees_with_itself():
    engine, tensor = Single(), torch.ones(2)
    assert engine.group("control") is None
    alone = engine.collectives()
    assert (alone.num, alone.process) == (1, 0)
    assert engine.gather({"a": [1]}) == [{"a": [1]}]
    assert engine.broadcast([None, "x"], 0) == [None, "x"]
    alone.fill({"t": tensor}, {"t": 0})
    alone.reduce(tensor)
    engine.add_up(tensor)
    assert tensor.tolist() == [1, 1]
    assert alone.lead(lambda: 3) == 3
    assert alone.all(lambda: "x") == ["x"]
    (outcome,) = alone.outcomes(lambda: 1 / 0)
    assert outcome == Outcome(None, "RuntimeError", "ZeroDivisionError: division by zero")


@pytest.mark.parametrize("value", [{1, 2}, object(), torch.ones(1), b"bytes", 1j])
def test_what_json_cannot_hold_is_refused_also_by_one_process(value):
    with pytest.raises(TypeError, match="not JSON serializable"):
        Single().gather(value)
    with pytest.raises(TypeError, match="not JSON serializable"):
        Single().broadcast(value, 0)


@pytest.mark.world_size(3)
def test_what_each_process_says_is_known_to_all():
    engine = detect()
    me = engine.membership.process
    for value in (me, None, "x" * me, [me] * 10_000, {"v": [me, {"\ud800": 0.1}]}, 2**70 + me):
        everyone = engine.gather(value)
        assert len(everyone) == 3
        assert everyone[me] == value
    assert engine.gather(me) == [0, 1, 2]
    assert [len(text) for text in engine.gather("x" * me * 100_000)] == [0, 100_000, 200_000]


@pytest.mark.world_size(3)
def test_what_one_process_has_is_on_all_of_them(monkeypatch):
    engine = detect()
    me = engine.membership.process
    for chunk in (collectives._CHUNK, 7):
        monkeypatch.setattr(collectives, "_CHUNK", chunk)
        for source in (0, 1, 2):
            for value in (None, "", [source, {"a": 0.1 + source}], "x" * 1000):
                mine = value if me == source else "not this"
                assert engine.broadcast(mine, source) == value


DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.bool,
    torch.int8,
    torch.uint16,
    torch.uint64,
    torch.complex64,
    torch.complex128,
]
SHAPES = [(), (0,), (3, 0), (5,), (2, 3, 4)]


def samples():
    for i, dtype in enumerate(DTYPES):
        for shape in SHAPES:
            generator = torch.Generator().manual_seed(i)
            content = torch.randint(0, 2, shape, generator=generator).to(dtype)
            yield f"{dtype} {shape}", content


def same_bits(one, other):
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    if one.numel():
        assert one.view(-1).view(torch.uint8).equal(other.view(-1).view(torch.uint8))


@pytest.mark.world_size(3)
@pytest.mark.parametrize(("chunk", "pack"), [(1 << 26, 1 << 24), (7, 1 << 24), (7, 20), (1, 0)])
def test_tensors_of_all_types_are_filled_in(monkeypatch, chunk, pack):
    monkeypatch.setattr(collectives, "_CHUNK", chunk)
    monkeypatch.setattr(collectives, "_PACK", pack)
    all_of_us = peers()
    me = all_of_us.process
    expected = dict(samples())
    owners = {name: number % 3 for number, name in enumerate(expected)}
    tensors = {
        name: content.clone() if owners[name] == me else torch.zeros_like(content)
        for name, content in expected.items()
    }
    tensors["not named"] = torch.full((2,), me)
    all_of_us.fill(tensors, owners)
    for name, content in expected.items():
        same_bits(tensors[name], content)
    assert tensors["not named"].tolist() == [me, me]


@pytest.mark.world_size(3)
def test_messages_have_tensors_of_all_types():
    all_of_us = peers()
    me = all_of_us.process
    mine = State({"who": me}, dict(samples()) if me != 1 else {})
    everyone = all_of_us.gather_states(mine)
    assert [each.tree for each in everyone] == [{"who": 0}, {"who": 1}, {"who": 2}]
    assert not everyone[1].tensors
    # A view of something larger, backwards in memory.
    told = all_of_us.broadcast_state(State(me, {"t": torch.arange(6).view(2, 3).t()}), 2)
    assert told.tree == 2
    same_bits(told.tensors["t"], torch.arange(6).view(2, 3).t().contiguous())
    for each in (everyone[0], everyone[2]):
        assert list(each.tensors) == [name for name, _ in samples()]
        for name, content in samples():
            same_bits(each.tensors[name], content)


@pytest.mark.world_size(3)
def test_every_bit_arrives():
    bits = torch.tensor([0x7F80_0001, 0x7FC1_2345, -0x8000_0000, 1], dtype=torch.int32)
    all_of_us = peers()
    # NaNs with a payload, a negative zero, and the smallest number there is.
    tensor = bits.view(torch.float32).clone() if all_of_us.process == 2 else torch.zeros(4)
    all_of_us.fill({"t": tensor}, {"t": 2})
    assert tensor.view(torch.int32).equal(bits)
    (told, *_) = all_of_us.gather_states(State(None, {"t": bits.view(torch.float32)}))
    assert told.tensors["t"].view(torch.int32).equal(bits)


@pytest.mark.world_size(2)
def test_tensors_that_are_not_contiguous_are_not_sent_wrongly():
    tensor = torch.zeros(3, 2).t()
    with pytest.raises(AssertionError):
        peers().fill({"t": tensor}, {"t": 0})


@pytest.mark.world_size(2)
def test_reductions():
    all_of_us = peers()
    tensor = torch.tensor([1.0, all_of_us.process], dtype=torch.float64)
    all_of_us.reduce(tensor)
    assert tensor.tolist() == [2, 1]
    all_of_us.reduce(tensor.mul_(1 + all_of_us.process), "max")
    assert tensor.tolist() == [4, 2]
    engine = detect()
    engine.add_up(tensor)
    assert tensor.tolist() == [8, 4]


class Odd(ValueError):
    """An error that nobody else knows, and that cannot be rebuilt from its text."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


@pytest.mark.world_size(3)
def test_an_error_of_one_is_the_error_of_all_and_travels_as_text():
    all_of_us = peers()
    me = all_of_us.process

    def fails_on(*those, error=Odd):
        def function():
            if me in those:
                raise error(me, "more")
            return me

        return function

    assert all_of_us.all(fails_on()) == [0, 1, 2]
    with pytest.raises(ValueError, match=r"^replica 1: 1 and more$"):
        all_of_us.all(fails_on(1))
    with pytest.raises(ValueError, match=r"^replica 0: 0 and more; replica 2: 2 and more$"):
        all_of_us.all(fails_on(0, 2))
    with pytest.raises(RuntimeError, match=r"^replica 2: FileNotFoundError: \[Errno 2\] more$"):
        all_of_us.all(fails_on(2, error=OSError))
    assert all_of_us.lead(fails_on(1, 2)) == 0
    with pytest.raises(ValueError, match=r"^0 and more$"):
        all_of_us.lead(fails_on(0))
    outcomes = all_of_us.outcomes(fails_on(1))
    assert [each.value for each in outcomes] == ([0, None, 2] if me == 0 else [])
    # All are still in step.
    assert all_of_us.gather(me) == [0, 1, 2]


@pytest.mark.world_size(2)
def test_records_have_a_wire(monkeypatch):
    def never(*_):
        raise AssertionError("something was pickled")

    for name in ("loads", "load", "dumps", "dump", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, never)
    all_of_us = peers()
    wire = Wire(lambda value: [value.real, value.imag], lambda state: complex(*state))
    me = all_of_us.process
    assert all_of_us.lead(lambda: 1 + 2j, wire) == 1 + 2j
    assert all_of_us.all(lambda: complex(me, 1), wire) == [1j, 1 + 1j]


def test_a_group_that_knows_its_errors():
    class Own(Collectives):
        kinds: ClassVar = {"Odd": Odd, "KeyError": KeyError}
        failure = LookupError

    alone = Own(None)
    with pytest.raises(KeyError):
        alone.lead(lambda: {}["x"])
    with pytest.raises(LookupError, match="TypeError"):
        alone.lead(lambda: 1 + "")
