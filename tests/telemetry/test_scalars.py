import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from resilin.core.events import EVENTS
from resilin.telemetry.extras import load
from resilin.telemetry.scalars import COUNTS, LABELS, SCALARS, Counts, scalars, words
from resilin.telemetry.wording import describe
from tests.telemetry import happenings
from tests.telemetry.happenings import ALL, step

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "sinks.md"


def test_the_run_has_every_kind_of_event():
    assert {event.name for event in ALL} == {*EVENTS, "unknown"}


def test_a_step_in_numbers():
    assert scalars(step(4)) == {
        "batch_size": 128.0,
        "replicas": 4.0,
        "local_bsz": 16.0,
        "accumulation_steps": 2.0,
        "scale": 2.0,
        "gain": 1.5,
        "lr": 0.1,
        "lr_factor": 1.5,
        "learning_rate": pytest.approx(0.15),
        "noise_scale": 80.0,
        "sqr_norm": 0.5,
        "trace": 40.0,
        "loss": 0.5,
        "step_seconds": 0.25,
        "samples": 512.0,
        "progress": 6.0,
        "epoch": 0.0,
        "generation": 1.0,
        "accuracy": 0.75,
        "top@5": 0.9,
    }


def test_all_names_occur_and_no_others():
    names = {name for event in ALL for name in scalars(event)}
    assert names == {*SCALARS, "accuracy", "top@5", "validation/accuracy"}
    counted = [count for count in map(Counts(), ALL) if count]
    assert {count.name for count in counted} == set(COUNTS)
    assert all(tuple(count.labels) == LABELS.get(count.name, ()) for count in counted)


def test_what_is_not_known_or_not_finite_is_left_out():
    unknown = dict.fromkeys(["lr", "sqr_norm", "trace", "seconds", "loss"])
    event = step(1, **unknown, gain=math.nan, metrics={"a": math.inf, "b": 1.0})
    missing = {"lr", "learning_rate", "sqr_norm", "trace", "noise_scale", "step_seconds", "loss"}
    assert {*scalars(step(1))} - {*scalars(event)} == missing | {"gain", "accuracy", "top@5"}
    assert scalars(event)["b"] == 1.0


@pytest.mark.parametrize("sqr_norm", [0.0, -0.1])
def test_without_signal_there_is_no_noise_scale(sqr_norm):
    values = scalars(step(1, sqr_norm=sqr_norm))
    assert "noise_scale" not in values
    assert values["sqr_norm"] == sqr_norm


def test_a_recorded_number_does_not_replace_one_of_ours():
    values = scalars(step(1, metrics={"gain": 7.0}))
    assert (values["gain"], values["user_gain"]) == (1.5, 7.0)


def test_a_reference_that_the_job_did_not_know_is_left_out():
    assert scalars(happenings.START)["reference"] == 64
    assert "reference" not in scalars(replace(happenings.START, reference=0))


def test_words_are_for_what_a_person_asks_about():
    told = [happenings.RESCALE, happenings.FAULT, happenings.DECISION, happenings.FAILED]
    assert [words(event) for event in told] == [describe(event) for event in told]
    assert all(words(event) for event in told)
    assert words(happenings.START) == (
        "starts: SGD with rule adascale, reference batch 64, 4 replicas on 2 hosts"
    )
    kept = replace(happenings.DECISION, batch_size=64)
    assert [words(event) for event in (step(1), happenings.SAVED, kept)] == [None] * 3


def test_steps_are_counted_by_their_numbers():
    counts = Counts()
    told = [happenings.START, step(1), step(2), step(10)]
    assert [count.num for count in map(counts, told) if count] == [1, 1, 8]


def test_a_sink_that_comes_late_counts_from_there():
    counts = Counts()
    assert [counts(step(n)).num for n in (500, 503)] == [1, 3]


def test_steps_that_are_done_again_count_again():
    counts = Counts()
    told = [step(10), replace(happenings.RESCALE, step=6), step(7), step(10), step(5), step(6)]
    found = [count for count in map(counts, told) if count]
    assert [count.num for count in found if count.name == "steps"] == [1, 1, 3, 1, 1]


def test_the_guide_has_all_names():
    rows = re.findall(r"^\| `(\w+)` \|", GUIDE.read_text(), re.MULTILINE)
    assert rows == [*SCALARS, *COUNTS]


def test_a_package_that_is_not_there_is_named_with_its_command():
    with pytest.raises(ImportError) as caught:
        load("no_such_package.part", "lab", "resilin top")
    assert str(caught.value) == "resilin top needs no_such_package: pip install 'resilin[lab]'"
    assert load("json.decoder", "lab").__name__ == "json.decoder"


def test_a_package_that_is_there_and_broken_says_so_itself(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("import its_missing_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="No module named 'its_missing_dependency'"):
        load("broken_package", "lab")


def test_the_sinks_load_no_package_until_they_are_used():
    code = (
        "import sys\n"
        "from resilin.telemetry import (\n"
        "    mlflow, opentelemetry, prometheus, scalars, tensorboard, wandb\n"
        ")\n"
        "heavy = 'torch mlflow opentelemetry prometheus_client tensorboard wandb'.split()\n"
        "assert not [name for name in heavy if name in sys.modules]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
