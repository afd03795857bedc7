"""Random programs: the oracle, the generator and the shrinker by themselves, and a few real runs.

`benchmarks/torture.py` runs many; here is what shows within seconds that the machinery can tell
right from wrong.
"""

from __future__ import annotations

import dataclasses
import random
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import resilin
from tests.fuzz import driver, hooks
from tests.fuzz.driver import REFUSALS, difference
from tests.fuzz.families import shapes, shapes_program, streams, streams_program
from tests.fuzz.oracle import Oracle
from tests.fuzz.program import (
    HOOKS,
    PLACES,
    Case,
    Kill,
    Program,
    generate,
    generate_home,
    generate_sharded,
    generate_stream,
)
from tests.fuzz.script import write
from tests.fuzz.shrink import shrink, simpler


def test_a_seed_is_always_the_same_case_and_survives_its_text_form():
    shaped = partial(generate_home, family="shapes")
    for make in (generate, generate_sharded, generate_stream, shaped):
        for seed in range(200):
            case = make(seed)
            assert case == make(seed)
            assert Case.from_json(case.to_json()) == case
            compile(driver.source(case), "script", "exec")


def test_a_sharded_program_shards_its_model():
    cases = [generate_sharded(seed) for seed in range(60)]
    assert {case.program.shard for case in cases} == {"root", "layers", "blocks"}
    assert all("parts.shard(p, net)" in write(case.program) for case in cases)
    assert "parts.shard" not in write(Program())


def test_every_place_to_be_killed_in_is_there():
    """A file that was moved would never be killed in again, and nobody would notice."""
    package = Path(resilin.__file__).parent
    places = (*PLACES, *streams.PLACES)
    assert [place for place in places if not (package / place).exists()] == []
    written = "".join(write(generate(seed).program) for seed in range(60))
    assert [name for name in HOOKS if f'kill_point("{name}")' not in written] == []


def test_the_oracle_counts_samples_exactly():
    """Under the linear rule each use of a sample moves `seen` by one over the reference batch."""
    program = Program(num_samples=10, batch_size=4, epochs=3, sizes="trace", trace=(3, 7, 2))
    state = Oracle(program).run()
    assert state["samples"] == 30
    # A short batch at the end of an epoch counts as the whole reference steps it stands for.
    assert (state["parameters"]["seen"] < 0).all()
    even = Oracle(dataclasses.replace(program, num_samples=12, sizes="fixed", trace=())).run()
    torch.testing.assert_close(
        even["parameters"]["seen"], torch.full((12,), -3 / 4, dtype=torch.float64)
    )


def test_a_difference_is_named_and_a_tolerance_is_kept():
    base = {"a": torch.ones(3, dtype=torch.float64), "b": [1, 2.0]}
    assert difference(base, base, 0.0) == ("", 0.0)
    near = {"a": base["a"] * (1 + 1e-12), "b": [1, 2.0]}
    assert difference(base, near, 1e-10)[0] == ""
    assert difference(base, near, 0.0)[0].startswith("a:")
    assert difference(base, {"a": base["a"], "b": [1, 2.1]}, 1e-10)[0].startswith("b[1]:")
    assert difference(base, {"a": base["a"]}, 1e-10)[0]
    nan = {"a": torch.full((3,), torch.nan, dtype=torch.float64), "b": [1, 2.0]}
    assert difference(base, nan, 1e-10)[0].startswith("a:")


# Loops of a shape of their own ---------------------------------------------------------------


def run_shape(options):
    """Runs a program here, as often as its loop is left on purpose; its name if it is refused."""
    expected = shapes_program.oracle(options)
    while True:
        resilin.reset_job()
        kit = shapes_program.Elastic(options)
        try:
            shapes_program.run(kit)
        except SystemExit:
            pass
        except (RuntimeError, ValueError) as error:
            names = [n for n in shapes.refusals(options) if re.search(REFUSALS[n], str(error))]
            if not names:
                raise
            right, got = expected.trajectory[kit.clock.steps], kit.final_state()["parameters"]
            assert difference(right, got, driver.TOLERANCE)[0] == ""
            return names[0]
        if hooks.plan is None or not (hooks.plan.folder / f"left-{hooks.plan.life}").exists():
            break
        resilin.reset_job()
        hooks.plan = hooks.Plan(hooks.plan.folder, hooks.plan.life + 1, hooks.plan.replica, None)
    assert difference(expected.final_state(), kit.final_state(), driver.TOLERANCE)[0] == ""
    return "same"


def shaped(shape, seed, **options):
    """A program of this shape, without worker processes."""
    return {**shapes.options(random.Random(f"{shape} {seed}"), shape), "workers": 0, **options}


KNOWN = {
    "hooked": {"how": "scale"},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shape", shapes.SHAPES)
def test_a_loop_of_any_shape_ends_as_in_plain_pytorch(shape, tmp_path, monkeypatch):
    for seed in range(2):
        (tmp_path / str(seed)).mkdir()
        monkeypatch.setattr(hooks, "plan", hooks.Plan(tmp_path / str(seed), 0, 0, None))
        run_shape(shaped(shape, seed, **KNOWN.get(shape, {})))


@pytest.mark.world_size(2)
@pytest.mark.filterwarnings("ignore")
def test_replicas_run_loops_of_any_shape(tmp_path, monkeypatch):
    monkeypatch.setattr(hooks, "plan", hooks.Plan(tmp_path, 0, dist.get_rank(), None))
    for shape in shapes.SHAPES:
        # Samples may be left out on one replica alone, which then refuses them alone.
        if shape not in ("left", "filtered"):
            run_shape(shaped(shape, 0, checkpoint_every=None, **KNOWN.get(shape, {})))


@pytest.mark.parametrize(
    ("shape", "options", "refusal"),
    [
        ("timm", {"update_freq": 2, "max_local_bsz": None}, "accumulation"),
        ("endless", {"how": "cycle"}, "kept batch"),
        ("nanogpt", {"endless": True}, "over the end"),
        ("zipped", {"how": "turns", "max_local_bsz": 1}, "in turn"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_shape_that_means_something_else_is_refused_before_a_wrong_step(shape, options, refusal):
    assert run_shape(shaped(shape, 0, epochs=2, checkpoint_every=None, **options)) == refusal


def test_shrinking_keeps_what_matters():
    kill = Kill(replica=1, at="stepped", count=8)
    case = Case(
        program=Program(ema=True, scheduler="StepLR", optimizer="adamw", clip="fixed", epochs=4),
        worlds=(3, 2, 4),
        kills=(kill, Kill(replica=0, at="epoch", count=1)),
    )

    def fails(case: Case) -> bool:
        return case.program.clip == "fixed" and any(kill.at == "stepped" for kill in case.kills)

    small = shrink(case, fails)
    assert fails(small)
    assert not any(fails(less) for less in simpler(small) if less != small)
    assert small.program == Program(clip="fixed", epochs=1, num_samples=4)
    assert [kill.at for kill in small.kills] == ["stepped"]


@pytest.mark.nightly(part="torture")
@pytest.mark.timeout(300)
def test_programs_under_kills_end_as_in_plain_pytorch(tmp_path, monkeypatch):
    """The last one is compared with the oracle of another program: that must be found."""
    monkeypatch.setattr(driver, "_oracle", oracle_of)
    cases = [
        Case(program=Program(ema=True, optimizer="adamw", evaluate="eval"), worlds=(2,)),
        Case(
            program=Program(
                net="mlp",
                optimizer="momentum",
                max_local_bsz=2,
                sizes="trace",
                trace=(4, 9, 3),
                weights="batch_weight",
                scheduler="OneCycleLR",
                schedule="clock",
                rule="sqrt",
            ),
            worlds=(2, 3, 1),
            kills=(
                Kill(replica=1, at="backward", count=3),
                Kill(replica=0, at="line:training/state/memory.py", count=40),
            ),
        ),
        Case(
            program=Program(
                net="mlp", shard="blocks", hybrid=True, optimizer="adamw", groups=2, ema=True
            ),
            worlds=(3, 2),
            kills=(Kill(replica=1, at="stepped", count=4),),
        ),
        Case(program=Program(), worlds=(2,), note="another program"),
    ]
    *outcomes, wrong = driver.run_cases(cases, tmp_path)
    assert [(o.kind, o.detail) for o in outcomes] == [("same", "")] * 3
    assert [o.kills for o in outcomes] == [0, 2, 1]
    assert wrong.kind == "different"
    assert wrong.detail.startswith("parameters")


@pytest.mark.nightly(part="torture")
@pytest.mark.timeout(300)
def test_a_shard_that_skips_too_few_samples_is_found(tmp_path, monkeypatch):
    """One sample is then used twice after a restart; an undisturbed run skips nothing."""
    kills = (Kill(replica=0, at="stepped", count=3),)
    cases = [
        Case(
            family="streams",
            options={"lengths": [9, 4, 7], "how": how, "batch_size": 5, "bookmark_every": 1},
            worlds=(1, 2),
            kills=kills,
        )
        for how in ("skip", "state")
    ]
    for folder in ("right", "wrong"):
        (tmp_path / folder).mkdir()
    right = driver.run_cases(cases, tmp_path / "right")
    assert [(o.kind, o.detail, o.kills) for o in right] == [("same", "", 1)] * 2
    monkeypatch.setenv(streams_program.TOO_FEW, "1")
    wrong = driver.run_cases(cases, tmp_path / "wrong")
    assert [o.failed for o in wrong] == [True, True]


def oracle_of(case: Case, got: dict) -> dict:
    changes = {"weight_decay": 1e-6} if case.note else {}
    return Oracle(dataclasses.replace(case.program, **changes)).run()
