"""Examples that recipes are made of: what a kill and another number of replicas leave of them."""

from __future__ import annotations

import difflib
import json
import os
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch.func import functional_call

from tests import forked

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
PATH = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
pytestmark = pytest.mark.usefixtures("fresh_job")


def launch(example, result, *options, call, rank=1, at="training", arguments=()):
    """Runs an example with two workers, one of which is killed."""
    command = [sys.executable, "-m", "resilin.cli", "run", "--warm", "--nproc", "2"]
    command += ["--run-dir", "off", *options]
    command += [str(ROOT / "tests/killed.py"), str(EXAMPLES / example), str(result)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATH}
    done = forked.run(
        [*command, "--rank", str(rank), "--at", at, "--call", str(call), *map(str, arguments)],
        env=environ,
        cwd=result.parent,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert result.with_suffix(".killed").exists()
    return [torch.tensor(each, dtype=torch.float64) for each in json.loads(result.read_text())]


def relative_distance(found, expected):
    flat = [torch.cat([each.detach().flatten() for each in some]) for some in (found, expected)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


@pytest.mark.nightly(part="docs")
@pytest.mark.parametrize(("example", "live"), [("gan.py", False), ("actor_critic.py", True)])
def test_players_that_take_turns_end_as_if_nobody_was_killed(tmp_path, example, live):
    expected = list(runpy.run_path(str(EXAMPLES / example))["main"]().parameters())
    # Each of two workers has two micro-batches in a step: it is killed between them.
    found = launch(example, tmp_path / "found", *["--live"] * live, call=84)
    assert (tmp_path / "found.killed").read_text() == "41"
    assert relative_distance(found, expected) < 1e-12


def test_a_worker_may_be_killed_between_two_optimizers_of_a_step(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["muon_and_adamw.py", "--double"])
    whole = runpy.run_path(str(EXAMPLES / "muon_and_adamw.py"))["main"]()
    for live, rank in ((True, 1), (False, 0)):
        found = launch(
            "muon_and_adamw.py",
            tmp_path / f"found-{live}",
            *["--live"] * live,
            at="AdamW",
            call=20,
            rank=rank,
            arguments=["--double"],
        )
        assert (tmp_path / f"found-{live}.killed").read_text() == "19"
        assert relative_distance(found, whole.parameters()) < 1e-12


def lines_of(name):
    text = (ROOT / f"tests/speedruns/{name}.py").read_text()
    return [line for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize(
    ("name", "optimizer", "call"), [("nanochat", "MuonAdamW", 13), ("torchtitan", "AdamW", 13)]
)
def test_a_loop_of_a_known_code_base_survives_with_its_own_optimizers(
    tmp_path, name, optimizer, call
):
    before = runpy.run_path(str(ROOT / f"tests/speedruns/{name}_before.py"))["main"]()
    for live, rank in ((True, 1), (False, 0)):
        result = tmp_path / f"found-{live}"
        example = ROOT / f"tests/speedruns/{name}.py"
        at = {"at": optimizer, "call": call, "rank": rank}
        found = launch(example, result, *["--live"] * live, **at)
        assert result.with_suffix(".killed").read_text() == str(call - 1)
        assert relative_distance(found, before.parameters()) < 1e-12
    # As the page says.
    old, new = lines_of(f"{name}_before"), lines_of(name)
    blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    page = (ROOT / "docs/recipes/muon-and-adamw.md").read_text()
    assert f"{len(old) - sum(block.size for block in blocks)} of {len(old)} lines" in page


@pytest.fixture(scope="module")
def best(tmp_path_factory):
    """The file with the best model of an undisturbed run, and the parameters at its end."""
    import resilin

    path = tmp_path_factory.mktemp("best") / "best.pt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["best_model.py", "--out", str(path)])
        resilin.reset_job()
        parameters = list(runpy.run_path(str(EXAMPLES / "best_model.py"))["main"]().parameters())
    return torch.load(path, weights_only=True), parameters


@pytest.mark.nightly(part="docs")
@pytest.mark.parametrize(
    ("at", "call", "rank", "live", "step"),
    [
        # In the last evaluation, which is not the best one: what was best must be known still.
        ("evaluation", 22, 1, False, 180),
        # Before and after the best model gets its name.
        ("writing", 4, 0, True, 150),
        ("written", 4, 0, False, 150),
    ],
)
def test_the_best_model_is_that_of_the_undisturbed_run(tmp_path, best, at, call, rank, live, step):
    expected, parameters = best
    assert expected["epoch"] == 4
    path, options = tmp_path / "best.pt", ["--live"] * live
    found = launch(
        "best_model.py",
        tmp_path / "found",
        *options,
        at=at,
        call=call,
        rank=rank,
        arguments=["--out", path],
    )
    assert (tmp_path / "found.killed").read_text() == str(step)
    # The weights that were tested, averages, are not those that were trained on.
    assert relative_distance(found, parameters) < 1e-12
    kept = torch.load(path, weights_only=True)
    assert (kept["accuracy"], kept["epoch"]) == (expected["accuracy"], expected["epoch"])
    weights = [kept["weights"], expected["weights"]]
    assert relative_distance(*([*each.values()] for each in weights)) < 1e-12
    assert relative_distance(kept["weights"].values(), parameters) > 1e-4


def test_two_groups_of_one_optimizer_are_two_optimizers_that_take_turns():
    import resilin

    gan = runpy.run_path(str(EXAMPLES / "gan.py"))
    ours = list(gan["main"]().parameters())
    resilin.reset_job()
    torch.manual_seed(0)
    players = gan["Players"]().double()
    adam = {"betas": (0.5, 0.999)}
    generator = torch.optim.Adam(players.generator.parameters(), lr=0.002, **adam)
    discriminator = torch.optim.Adam(players.discriminator.parameters(), lr=0.004, **adam)
    loader = resilin.AdaptiveDataLoader(gan["Ring"](), batch_size=100, shuffle=True)
    steps = 0
    for _ in resilin.remaining_epochs_until(10):
        for real, noise in loader:
            turn = "generator" if steps % 4 == 3 else "discriminator"
            players.zero_grad()
            gan["loss_of"](players(real, noise, turn), turn).backward()
            (generator if turn == "generator" else discriminator).step()
            steps += 1
    assert relative_distance(ours, list(players.parameters())) < 1e-12


def test_the_fixed_player_passes_its_gradient_on_and_has_none():
    gan = runpy.run_path(str(EXAMPLES / "gan.py"))
    players = gan["Players"]().double()
    noise = torch.randn(5, gan["LATENT"], dtype=torch.float64)
    gan["loss_of"](players(None, noise, "generator"), "generator").backward()
    assert all(p.grad is None for p in players.discriminator.parameters())
    mine = [p.grad.clone() for p in players.generator.parameters()]
    players.zero_grad()
    through = functional_call(players.discriminator, {}, (players.generator(noise),))
    gan["loss_of"](through, "generator").backward()
    for one, other in zip(mine, players.generator.parameters(), strict=True):
        assert torch.allclose(one, other.grad)
