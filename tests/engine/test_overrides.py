"""A script that is steered from outside: a trace, a rule, a seed and a place of its own."""

import logging

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import resilin
from resilin.core.events import StartEvent, StepEvent
from resilin.core.rules import PowerRule, get_rule
from resilin.core.trace import TraceError
from resilin.engine import overrides

pytestmark = pytest.mark.usefixtures("fresh_job")

NUM = 300

SLOW = PowerRule(0.25)


class Slower(PowerRule):
    def __init__(self):
        super().__init__(0.125)


def make(**loader_kwargs):
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(NUM, 3, dtype=torch.float64))
    net = nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = resilin.AdaptiveDataParallel(net, optimizer, rule="constant")
    loader = resilin.AdaptiveDataLoader(dataset, **{"batch_size": 32, **loader_kwargs})
    return model, optimizer, loader


def train(model, optimizer, loader, epochs=1):
    """Which micro-batches there were, and after which of them the optimizer stepped."""
    seen = []
    for _ in resilin.remaining_epochs_until(epochs):
        for (x,) in loader:
            model(x).square().mean().backward()
            steps = model.clock.steps
            optimizer.step()
            optimizer.zero_grad()
            seen.append((len(x), "update" if model.clock.steps > steps else "accumulate"))
    return seen


@pytest.fixture
def trace(tmp_path, monkeypatch):
    def write(text, end=None):
        path = tmp_path / "trace.csv"
        path.write_text("step,batchsize\n" + text)
        monkeypatch.setenv("RESILIN_BATCH_TRACE", str(path))
        if end:
            monkeypatch.setenv("RESILIN_BATCH_TRACE_END", end)
        return str(path)

    return write


def test_the_classic_example_of_accumulation(trace):
    trace("0,64\n1,96\n")
    seen = train(*make(max_local_bsz=32))
    assert [what for _, what in seen[:5]] == [
        "accumulate",
        "update",
        "accumulate",
        "accumulate",
        "update",
    ]
    assert {size for size, _ in seen[:5]} == {32}


def test_a_trace_goes_before_whatever_the_script_says(trace, caplog, every_step_told):
    source = trace("0,7\n2,50\n", end="repeat")
    told = []
    resilin.listen(told.append)
    model, optimizer, loader = make()
    loader.autoscale_batch_size(64, local_bsz_bounds=(8, 16), gradient_accumulation=False)
    with caplog.at_level(logging.INFO, logger="resilin"):
        train(model, optimizer, loader)
        loader.set_batch_size(1)
    steps = [event for event in told if isinstance(event, StepEvent)]
    assert [step.batch_size for step in steps][:6] == [7, 7, 50, 7, 7, 50]
    # What does not fit the script's micro-batches is accumulated.
    assert max(step.local_bsz for step in steps) <= 16
    assert sum(step.batch_size for step in steps) == NUM
    assert loader.autoscaler is None
    (start,) = [event for event in told if isinstance(event, StartEvent)]
    assert start.replays == source
    assert f"follows {source}, not the script" in caplog.text


def test_a_trace_is_not_for_evaluation(trace):
    trace("0,64\n")
    model, optimizer, loader = make()
    held_out = resilin.AdaptiveDataLoader(loader.dataset, batch_size=100)
    train(model, optimizer, loader)
    model.eval()
    assert [len(x) for (x,) in held_out] == [100, 100, 100]


def test_a_broken_trace_is_an_error_that_names_it(trace):
    source = trace("0,64\n0,96\n")
    with pytest.raises(TraceError, match=f"{source}, line 3"):
        train(*make())


@pytest.mark.world_size(2)
def test_replicas_with_fewer_samples_than_others_have_the_exact_gradient(shared_path, monkeypatch):
    """Sizes that divide nothing; the second step has a sample for one replica only."""
    path = shared_path / f"trace-{torch.distributed.get_rank()}.csv"
    path.write_text("step,batchsize\n0,3\n1,1\n2,7\n")
    monkeypatch.setenv("RESILIN_BATCH_TRACE", str(path))
    model, optimizer, loader = make(max_local_bsz=1)
    torch.manual_seed(0)
    x = torch.randn(NUM, 3, dtype=torch.float64)
    plain = nn.Linear(3, 1).double()
    other = torch.optim.SGD(plain.parameters(), lr=0.01)
    counts, size, own = [], 0, 0
    for (part,) in loader:
        own += loader.current_samples
        model(part).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        size += 1
        if model.clock.steps > len(counts):
            counts.append(size)
            size = 0
        if len(counts) == 3:
            break
    cursor = 0
    for batch in (3, 1, 7):
        plain(x[cursor : cursor + batch]).square().mean().backward()
        other.step()
        other.zero_grad()
        cursor += batch
    torch.testing.assert_close(model.module.weight, plain.weight, rtol=1e-12, atol=1e-12)
    everyone = [None, None]
    torch.distributed.all_gather_object(everyone, counts)
    # As many micro-batches on both, of which some are fillers: each sample is used once.
    assert everyone == [[2, 1, 4], [2, 1, 4]]
    torch.distributed.all_gather_object(everyone, own)
    assert sum(everyone) == 3 + 1 + 7


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("linear", get_rule("linear")),
        (f"{__name__}:SLOW", SLOW),
        (f"{__name__}:Slower", Slower()),
        ("resilin.core.rules:PowerRule", None),
    ],
)
def test_a_rule_goes_before_that_of_the_script(name, rule, monkeypatch):
    monkeypatch.setenv("RESILIN_RULE", name)
    if rule is None:
        with pytest.raises(ValueError, match="missing 1 required positional argument"):
            make()
    else:
        assert make()[0].rule == rule


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fast", r"rule \('fast'\) must be one of"),
        ("no_such_module:Rule", "cannot be imported: No module named"),
        (f"{__name__}:NUM", "300 is not a scaling rule"),
        (f"{__name__}:absent", "cannot be imported: .* no attribute 'absent'"),
    ],
)
def test_a_rule_that_is_none_is_an_error(name, message, monkeypatch):
    monkeypatch.setenv("RESILIN_RULE", name)
    with pytest.raises(ValueError, match=message):
        make()


def test_a_seed_is_for_loaders_that_have_none(monkeypatch):
    def order(**kwargs):
        loader = resilin.AdaptiveDataLoader(torch.arange(8), batch_size=8, shuffle=True, **kwargs)
        return next(iter(loader)).tolist()

    plain, seeded = order(), order(seed=3)
    monkeypatch.setenv("RESILIN_SEED", "3")
    assert order() == seeded != plain
    assert order(seed=0) == plain
    monkeypatch.setenv("RESILIN_SEED", "-1")
    with pytest.raises(ValueError, match=r"RESILIN_SEED \('-1'\) must be a whole number"):
        order()


def test_runs_of_the_lab_do_not_go_on_from_each_other(tmp_path, monkeypatch):
    for run in ("a", "b"):
        monkeypatch.setenv("RESILIN_LAB", "1")
        monkeypatch.setenv("RESILIN_RUN_DIR", str(tmp_path / run))
        model, optimizer, loader = make()
        resilin.checkpoint_to(tmp_path / "shared")
        assert resilin.resume() is None
        train(model, optimizer, loader)
        assert model.clock.samples == NUM
        resilin.reset_job()
    assert not (tmp_path / "shared").exists()
    assert (tmp_path / "a" / "checkpoints").is_dir()
    monkeypatch.delenv("RESILIN_LAB")
    assert overrides.checkpoint_dir("shared") == "shared"
