"""Before and after of the migration guides do the same, or differ as the guide says.

What needs AdaptDL, FairScale or Run:AI runs where they are installed. Each of these tests has a
process of its own, because none of the three can be started twice in one.
"""

import inspect
import os
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

import resilin
from docs.blocks import blocks
from resilin.engine.group import LAUNCHER_ENV
from tests.migrate.pages import NEEDED, PAGES, after, before, needs, task, text, words

pytestmark = pytest.mark.nightly(part="docs")

alone = pytest.mark.world_size(1, init=False)
old = pytest.mark.filterwarnings("ignore")


class Stopped(Exception):
    """Raised by a script that is not to go on."""


def play(*scripts: str) -> dict[str, Any]:
    """Runs these as one script, in float64; its variables."""
    torch.set_default_dtype(torch.float64)
    variables: dict[str, Any] = {"__name__": "__main__", "Stopped": Stopped}
    try:
        for script in scripts:
            exec(compile(script, "<page>", "exec"), variables)
    except Stopped:
        pass
    return variables


def play_alone(*scripts: str) -> dict[str, Any]:
    """The same, as if no launcher and no other script had been there."""
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in (*LAUNCHER_ENV, "TORCHELASTIC_USE_AGENT_STORE"):
        os.environ.pop(name, None)
    resilin.reset_job()
    return play(*scripts)


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    pairs = zip(one["module"].parameters(), other["module"].parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def in_order(code: str) -> str:
    """The same script with samples in the order of the dataset, which is nobody's own."""
    assert "shuffle=True" in code
    return code.replace("shuffle=True", "shuffle=False")


def replaced(code: str, line: str, by: str) -> str:
    """Another line in place of this one, with its indentation."""
    (found,) = re.finditer(rf"^( *){re.escape(line)}$", code, re.MULTILINE)
    lines = [found[1] + new for new in by.splitlines()]
    return code[: found.start()] + "\n".join(lines) + code[found.end() :]


# AdaptDL -------------------------------------------------------------------------------------


def test_from_adaptdl_one_word_changes():
    assert before("adaptdl").replace("adaptdl.torch", "resilin") == after("adaptdl")


@needs("adaptdl")
@alone
@old
def test_adaptdl_and_resilin_train_the_same_model_at_a_fixed_batch():
    def fixed(code):
        call = re.compile(r"^loader\.autoscale_batch_size.*\n", re.MULTILINE)
        return call.sub("", in_order(code))

    theirs = play_alone(task("adaptdl"), fixed(before("adaptdl")))
    ours = play_alone(task("adaptdl"), fixed(after("adaptdl")))
    assert ours["model"].clock.steps == 3 * 15
    assert distance(theirs, ours) < 1e-12


@needs("adaptdl")
@alone
@old
def test_adaptdl_ends_epochs_late_and_does_not_count_what_is_dropped():
    counted = replaced(
        before("adaptdl"), "optimizer.step()", "optimizer.step()\nsteps.append(epoch)"
    )
    steps = play_alone(task("adaptdl"), "steps = []", counted)["steps"]
    assert [steps.count(epoch) for epoch in range(3)] == [17, 16, 15]
    assert "17 + 16 + 15 steps" in text("adaptdl")


# FairScale -----------------------------------------------------------------------------------


@needs("fairscale")
@alone
@old
def test_fairscale_and_resilin_make_the_same_first_step():
    zero = "optimizer.zero_grad()"
    hers = replaced(before("fairscale"), zero, "gain = optimizer.gain()\nraise Stopped")
    stop = "if model.clock.steps == 1:\n    gain = model.gain\n    raise Stopped\n"
    mine = replaced(after("fairscale"), zero, stop + zero)
    theirs = play(task("fairscale"), in_order(hers))
    ours = play_alone(task("fairscale"), in_order(mine))
    assert 1 < theirs["gain"] < 4
    assert theirs["gain"] == pytest.approx(ours["gain"], rel=1e-6)
    assert distance(theirs, ours) < 1e-7


@needs("fairscale")
@alone
@old
def test_fairscale_loses_a_part_of_the_variance_when_the_scale_is_set():
    theirs = play(task("fairscale"), before("fairscale"))
    assert 3 * 512 / 32 <= theirs["progress"] < 3 * 512 / 32 + 4
    optimizer = theirs["optimizer"]
    # (v + s) / (v / S + s) at S = 4 says v / s, and with it what the gain at S = 16 is.
    ratio = (optimizer.gain() - 1) / (1 - optimizer.gain() / 4)
    right = (ratio + 1) / (ratio / 16 + 1)
    optimizer.set_scale(16, update_estimate=False)
    assert optimizer.gain() == pytest.approx(right)
    optimizer.set_scale(4, update_estimate=False)
    optimizer.set_scale(16)
    assert optimizer.gain() < 0.8 * right


# Run:AI --------------------------------------------------------------------------------------


@needs("runai")
@alone
@old
def test_runai_adds_up_what_resilin_averages():
    hers = in_order(before("runai"))
    at_recipe = hers.replace("lr=0.025", "lr=0.1")
    divided = at_recipe.replace("model(x), y)", "model(x), y) / runai.elastic.steps")
    ours = play_alone(task("runai"), in_order(after("runai")))
    assert distance(play(task("runai"), hers), ours) < 1e-12
    assert distance(play(task("runai"), divided), ours) < 1e-12
    assert distance(play(task("runai"), at_recipe), ours) > 1e-2


SPLIT = re.compile(r"^\| (\d+), (\d) GPUs? \| (\d+) x (\d+) = (\d+)(, above 64)? \| (.*) \|$", re.M)


def splits() -> list[re.Match[str]]:
    found = list(SPLIT.finditer(text("runai")))
    assert len(found) == 4
    return found


def test_the_splits_of_resilin_are_those_of_the_page():
    for row in splits():
        plan = resilin.BatchPlan(int(row[1]), int(row[2]), max_local_bsz=64)
        parts = [plan.micro_batches(replica) for replica in range(plan.replicas)]
        assert sum(map(sum, parts)) == int(row[1])
        largest = max(map(max, parts))
        exact = f"{plan.steps} x {largest} = {row[1]}"
        assert row[7] in (exact, f"{row[1]}, at most {largest} at once")


@needs("runai")
@alone
@old
def test_the_splits_of_runai_are_those_of_the_page():
    import runai.elastic.torch

    for row in splits():
        gpus = int(row[2])
        runai.elastic.torch.init(int(row[1]), 64, gpus=gpus)
        parts, size = runai.elastic.steps * gpus, runai.elastic.batch_size
        assert [int(row[3]), int(row[4]), int(row[5])] == [parts, size, parts * size]
        assert bool(row[6]) == (size > 64)


# By hand -------------------------------------------------------------------------------------


@pytest.mark.world_size(2, init=False)
def test_by_hand_on_two_processes_and_resilin_end_with_the_same_parameters():
    page = [block.code for block in blocks(PAGES["accumulation"])]
    (elastic,) = [code.split("\n\n\n")[0] for code in page if "def elastic" in code]
    hand = play(page[0], before("accumulation"))
    assert hand["steps"] == 2
    ours = play(page[0], elastic, "module = elastic(data)")
    assert resilin.current_job().engine.membership.num_replicas == 2
    assert distance(hand, ours) < 1e-12


# Completeness --------------------------------------------------------------------------------


def adaptdl_names() -> tuple[list[str], list[Any]]:
    import adaptdl.env
    import adaptdl.torch as at
    import adaptdl.torch.scaling_rules as rules

    names = [*at.__all__, *rules.__all__, "AdamScale", "State", "save_all_states", "load_state"]
    for owner in (at.AdaptiveDataParallel, at.data.AdaptiveDataLoaderMixin):
        names += [name for name in vars(owner) if name != "forward"]
    names += [name for name, value in vars(adaptdl.env).items() if inspect.isfunction(value)]
    loader = at.AdaptiveDataLoader
    functions = [at.init_process_group, at.AdaptiveDataParallel, loader, rules.LEGWScale]
    return names, [*functions, loader.autoscale_batch_size]


def fairscale_names() -> tuple[list[str], list[Any]]:
    from fairscale.optim import AdaScale

    functions = [AdaScale, AdaScale.set_scale, AdaScale.gain]
    functions.append(AdaScale.set_num_gradients_to_accumulate)
    return [*vars(AdaScale), "AdaScaleWrapper"], functions


def runai_names() -> tuple[list[str], list[Any]]:
    import runai.elastic.torch
    import runai.ga.torch.optim as ga

    runai.elastic.torch.init(4, 2, gpus=1)
    names = [n for n, value in vars(runai.elastic).items() if not inspect.ismodule(value)]
    names += [name for name in vars(ga) if name[0].isupper() and name != "State"]
    return names, [runai.elastic.torch.init, ga.Optimizer]


OFFERED = {"adaptdl": adaptdl_names, "fairscale": fairscale_names, "runai": runai_names}


@pytest.mark.parametrize("page", [pytest.param(page, marks=needs(page)) for page in NEEDED])
@alone
@old
def test_the_table_leaves_no_public_name_of_the_peer_out(page):
    names, functions = OFFERED[page]()
    names += [name for function in functions for name in inspect.signature(function).parameters]
    public = {name for name in names if name[0] != "_"} - {"self", "kwargs"}
    assert len(public) >= 10
    assert public <= words(page)
