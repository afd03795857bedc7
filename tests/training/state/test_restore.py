"""Who has the newest state, and how the others get it."""

import logging
from pathlib import Path

import pytest
import torch

from resilin.core.recovery import candidates
from resilin.training.job import current_job
from resilin.training.state import memory_file, memory_scan
from resilin.training.state.checkpoint import Checkpoints
from resilin.training.state.memory import MemoryCopies, Place
from resilin.training.state.replica_parts import OwnState
from resilin.training.state.restore import Content, newest_state
from resilin.training.state.snapshot import Snapshot, Version
from tests.replicas import replica

SUM = {"sums/start/0": {"samples": 3.0}}


def state(step, generation=0, replicas=2):
    tensors = {
        "model.weight": torch.full((5,), float(step)),
        "model.half": torch.ones(3).bfloat16(),
    }
    return Snapshot(Version(generation, step), {"job": {"replicas": replicas}}, tensors)


def keep(copies, snapshot, sums, who, num_local=1, local=0, host=None):
    place = Place(
        host=who if host is None else host,
        local_process=local,
        num_local_processes=num_local,
        process=who,
    )
    before = Version(snapshot.version.generation, snapshot.version.step - 1)
    copies.keep(snapshot, sums, place, previous=before)


@pytest.mark.world_size(2)
def test_a_host_without_a_copy_gets_it_from_one_that_has_it(tmp_path, caplog):
    copies = MemoryCopies(tmp_path / "memory")
    if replica() == 1:
        keep(copies, state(7), SUM, who=1)
    caplog.set_level(logging.WARNING, "resilin")
    snapshot, source, _, in_memory = newest_state(current_job().engine, copies, None)
    assert (snapshot.version, source) == (Version(0, 7), "memory")
    assert in_memory == (replica() == 1)
    assert torch.equal(snapshot.tensors["model.weight"], torch.full((5,), 7.0))
    assert snapshot.tensors["model.half"].dtype == torch.bfloat16
    # The sums of replica 0 went with its host: the rest goes on, and it is said.
    assert snapshot.tree["sums/start/0"] == {"samples": 3.0}
    assert ("Accumulators resume without" in caplog.text) == (replica() == 0)


@pytest.mark.world_size(2)
def test_a_copy_that_changes_after_the_scan_is_not_taken_for_one_that_is_here(
    tmp_path, monkeypatch
):
    copies = MemoryCopies(tmp_path / "memory")
    keep(copies, state(7), SUM, who=replica())

    def changed(*_):
        raise OSError("it was overwritten")

    if replica() == 0:
        monkeypatch.setattr(memory_scan, "read_pieces", changed)
    found = newest_state(current_job().engine, copies, None)
    assert (found.snapshot.version, found.in_memory) == (Version(0, 7), replica() == 1)
    assert torch.equal(found.snapshot.tensors["model.weight"], torch.full((5,), 7.0))


def test_sums_of_all_replicas_are_worth_one_step_that_not_all_have_ended(tmp_path):
    first, second = MemoryCopies(tmp_path), MemoryCopies(tmp_path)
    for step in (4, 5):
        keep(first, state(step), SUM, who=0, num_local=2, local=0, host=0)
    keep(second, state(4), SUM, who=1, num_local=2, local=1, host=0)
    snapshot, *_ = newest_state(current_job().engine, first, None)
    assert snapshot.version.step == 4
    assert snapshot.tree["sums/start/0"] == {"samples": 6.0}


def test_without_sums_the_newest_step_is_taken(tmp_path):
    first, second = MemoryCopies(tmp_path), MemoryCopies(tmp_path)
    for step in (4, 5):
        keep(first, state(step), {}, who=0, num_local=2, local=0, host=0)
    keep(second, state(4), {}, who=1, num_local=2, local=1, host=0)
    assert newest_state(current_job().engine, first, None)[0].version.step == 5


def test_whole_sums_of_an_earlier_generation_are_not_worth_going_back(tmp_path):
    old, new = MemoryCopies(tmp_path), MemoryCopies(tmp_path)
    keep(old, state(90, generation=1, replicas=1), SUM, who=0)
    keep(new, state(50, generation=2), SUM, who=0)
    assert newest_state(current_job().engine, new, None)[0].version == Version(2, 50)


@pytest.mark.parametrize(
    ("owners", "replicas", "step"),
    [
        # Replica 1 died within step 5: only step 4 has what both have of their own.
        ({0}, 2, 4),
        # Nobody gets anything back at another number of replicas.
        ({0}, 1, 5),
        ({0, 1}, 2, 5),
        # Nothing of their own: an empty part is no part.
        (set(), 2, 5),
    ],
)
def test_what_each_has_of_its_own_is_worth_one_step(owners, replicas, step):
    before = Content(2, None, {0: {}, 1: {}}, owners | {1} if owners else owners)
    newest = Content(2, Version(0, 4), {each: {} for each in owners | {0}}, owners)
    held = [before.held(Version(0, 4), replicas), newest.held(Version(0, 5), replicas)]
    assert candidates(held)[0].version.step == step


def test_the_memory_is_scanned_once_to_choose_and_may_change_after_it(
    tmp_path, monkeypatch, caplog
):
    copies = MemoryCopies(tmp_path)
    for step in (4, 5):
        keep(copies, state(step, replicas=1), SUM, who=0)
    read = []
    own = memory_file.read_meta

    def gone_after_the_first_scan(path):
        read.append(path)
        return own(path) if read.count(path) == 1 or path != newest else None

    for module in (memory_scan, memory_file):
        monkeypatch.setattr(module, "read_meta", gone_after_the_first_scan)
    newest = next(file.path for file in copies.scan().files if file.version.step == 5)
    read.clear()
    snapshot, *_ = newest_state(current_job().engine, copies, None)
    # Another process has begun to write the next one there.
    assert "was overwritten while it was read" in caplog.text
    assert max(map(read.count, read)) == 2  # to choose, and after it was read
    assert (snapshot.version.step, snapshot.tree["sums/start/0"]) == (4, SUM["sums/start/0"])


@pytest.mark.world_size(2)
def test_what_each_has_of_its_own_comes_from_all_hosts(tmp_path):
    copies = MemoryCopies(tmp_path / "memory")
    mine = OwnState(
        {"own/random": {"$": "tensor", "of": "own/random"}}, {"own/random": torch.tensor(replica())}
    )
    copies.keep(
        state(7),
        {},
        Place(host=replica(), local_process=0, num_local_processes=1, process=replica()),
        mine,
    )
    snapshot, *_ = newest_state(current_job().engine, copies, None)
    assert [int(snapshot.state(f"own/{i}/random")) for i in range(2)] == [0, 1]


def test_a_memory_copy_wins_over_checkpoints_older_than_a_corrupt_one(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for step in (3, 9):
        commit = checkpoints.save(state(step, replicas=1))
    for file in Path(commit.path).glob("*.distcp"):
        file.write_bytes(b"torn")
    copies = MemoryCopies(tmp_path / "memory")
    keep(copies, state(7, replicas=1), {}, who=0)
    snapshot, source, *_ = newest_state(current_job().engine, copies, checkpoints)
    assert (snapshot.version.step, source) == (7, "memory")
    copies.forget()
    snapshot, source, *_ = newest_state(current_job().engine, copies, checkpoints)
    assert (snapshot.version.step, source) == (3, "checkpoint")


def test_a_part_that_was_never_written_is_empty_where_all_others_are(tmp_path):
    copies, place = (
        MemoryCopies(tmp_path),
        Place(host=0, local_process=0, num_local_processes=2, process=0),
    )
    copies.keep(state(0), {}, place, OwnState({"own/random": {}}, {}))
    snapshot, *_ = newest_state(current_job().engine, copies, None)
    assert [snapshot.state(f"own/{i}/random") for i in range(2)] == [{}, {}]
