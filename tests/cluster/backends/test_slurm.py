"""Parts on a real Slurm: slurmctld and four slurmd on this machine."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import signal
import socket
import sys
import threading
import time

import pytest

from resilin.cluster.backends.base import BackendError, Part, PartState
from resilin.cluster.backends.slurm import SlurmBackend, backend
from resilin.cluster.backends.slurm_options import SlurmOptions
from tests.cluster.slurm_cluster import missing, slurm_cluster

pytestmark = [
    pytest.mark.nightly(part="clusters"),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]
TIMEOUT = 200.0
NUMBERS = itertools.count()
WAITING = ((1, "deaf"), (2, "hears"))
"""Parts whose time is up after minutes: the node of each, and what it does when it is asked."""
WAITS = """
import os, pathlib, signal, sys, time

out = pathlib.Path(sys.argv[1])


def leave(number, frame):
    (out / "got").write_text(str(number))
    if sys.argv[2] != "deaf":
        sys.exit(128 + number)


for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, leave)
(out / "here").write_text("\\n".join([os.getcwd(), os.environ["SAID"], *sys.argv[3:]]))
print("started", flush=True)
while not (out / "end").exists():
    time.sleep(0.05)
sys.exit(int((out / "end").read_text()))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), grace=60) as running:
        yield running


@pytest.fixture
def slurm(cluster, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    yield cluster
    cluster.clean()


@pytest.fixture
def named(slurm):
    """A name that no cluster has had: Slurm remembers parts that have ended."""
    return f"ours-{next(NUMBERS)}"


@pytest.fixture
def ours(named):
    return SlurmBackend(named)


def waiting(directory, name="job-g1-0", node="n2", accelerators=1, *, how="hears", more=()):
    """A part that waits until it is told how to end."""
    script = directory / "waits.py"
    script.write_text(WAITS)
    (directory / name).mkdir(exist_ok=True)
    return Part(
        name=name,
        job="job",
        node=node,
        accelerators=accelerators,
        command=[sys.executable, str(script), str(directory / name), how, *more],
        environment={"SAID": 'it\'s a "test"\n#SBATCH --hold'},
        directory=str(directory),
        log=str(directory / f"{name} 5%j.log"),
    )


@pytest.fixture
def part(tmp_path):
    """Makes parts that wait until they are told how to end."""
    return functools.partial(waiting, tmp_path)


class Minutes:
    """Parts on a cluster of their own, whose time is up after minutes, as Slurm counts time."""

    def __init__(self, cluster, directory):
        self.cluster, self.directory = cluster, directory
        self.grace = SlurmBackend("grace")
        self.limit = backend("limit", {"time": "2", "notice": "100", "sbatch": "--nice=5"})
        deaf, hears = (waiting(directory, f"job-g1-{n}", f"n{n}", how=how) for n, how in WAITING)
        with self.here():
            self.grace.start(deaf)
            self.limit.start(hears)
            here(deaf, directory)
            here(hears, directory)
            self.grace.stop(deaf.name, 90)
            self.first = self.minutes()
            self.grace.stop(deaf.name, 600)  # longer: no more than before
            self.second = self.minutes()
            self.grace.stop(deaf.name, 1)
            self.third = self.minutes()

    @contextlib.contextmanager
    def here(self):
        """The commands of Slurm find this cluster."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_CONF", self.cluster.environment["SLURM_CONF"])
            yield

    def minutes(self):
        """The time limit of the first part."""
        name = "--name=grace.job-g1-1"
        return self.cluster.call("squeue", "--noheader", name, "--Format=TimeLimit").strip()

    def ended(self, ours, name):
        """What has become of a part, once its time is up: Slurm looks every 30 s."""
        deadline = time.monotonic() + 200
        with self.here():
            while seen(ours, name).state is not PartState.ENDED:
                assert time.monotonic() < deadline
                time.sleep(0.5)
            return seen(ours, name)


@pytest.fixture(scope="module")
def minutes(tmp_path_factory):
    with slurm_cluster(tmp_path_factory.mktemp("minutes"), num_nodes=2) as running:
        yield Minutes(running, tmp_path_factory.mktemp("parts"))


@pytest.fixture(scope="module", autouse=True)
def _minutes_begin_early(request):
    """What takes minutes begins before the other tests, which go on meanwhile."""
    chosen = [item for item in request.session.items if item.path == request.path]
    if any("minutes" in item.fixturenames for item in chosen):
        request.getfixturevalue("minutes")


def wait_until(check):
    """What `check` answers, once it is true."""
    deadline = time.monotonic() + TIMEOUT
    while not (found := check()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


def seen(ours, name="job-g1-0"):
    found = [each for each in ours.list() if each.name == name]
    assert len(found) <= 1
    return found[0] if found else None


def until(ours, state, name="job-g1-0"):
    wait_until(lambda: (found := seen(ours, name)) and found.state is state)
    return seen(ours, name)


def here(part, tmp_path):
    return wait_until(
        lambda: (file := tmp_path / part.name / "here").exists() and file.read_text().splitlines()
    )


def end(part, tmp_path, code):
    hidden = tmp_path / part.name / "hidden"
    hidden.write_text(str(code))
    hidden.rename(tmp_path / part.name / "end")


def by_name(backend):
    return {node.name: node for node in backend.nodes()}


# Start, list -------------------------------------------------------------------------------------


def test_it_says_why_there_is_no_slurm(slurm, ours, monkeypatch, tmp_path):
    assert ours.detect() is None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    known = (slurm.directory / "slurm.conf").read_text()
    # The commands try for 10 s, unless told otherwise.
    elsewhere = re.sub("SlurmctldPort=.*", f"SlurmctldPort={port}\nMessageTimeout=2", known)
    (tmp_path / "slurm.conf").write_text(elsewhere)
    with monkeypatch.context() as patch:
        patch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
        assert "DOWN" in ours.detect()
        with pytest.raises(BackendError, match=r"squeue.*Unable to contact slurm controller"):
            ours.list()
        patch.setenv("PATH", str(tmp_path))
        assert "no sbatch, scancel, scontrol, squeue on the path" in ours.detect()


def test_a_part_runs_where_and_as_it_was_told(ours, part, tmp_path):
    one = part(more=["a b", "$HOME", "it's"])
    ours.start(one)
    said = here(one, tmp_path)
    assert said == [str(tmp_path), *one.environment["SAID"].splitlines(), "a b", "$HOME", "it's"]
    found = seen(ours)
    assert (found.state, found.node, found.code) == (PartState.RUNNING, "n2", None)
    end(one, tmp_path, 0)
    found = until(ours, PartState.ENDED)
    assert (found.code, found.node) == (0, "n2")
    assert (tmp_path / "job-g1-0 5%j.log").read_text() == "started\n"


def test_a_part_that_fails_has_its_code(ours, part, tmp_path):
    one = part()
    ours.start(one)
    here(one, tmp_path)
    end(one, tmp_path, 7)
    assert until(ours, PartState.ENDED).code == 7


def test_a_start_that_is_repeated_finds_the_first(slurm, ours, part, tmp_path, named):
    one = part()
    for _ in range(3):
        ours.start(one)
    here(one, tmp_path)
    end(one, tmp_path, 0)
    until(ours, PartState.ENDED)
    ours.start(one)  # it has existed
    assert (
        len(
            slurm.call("squeue", "--noheader", "--states=all", f"--name={named}.job-g1-0").split(
                "\n"
            )
        )
        == 2
    )


def test_two_controllers_that_start_a_part_at_once_start_one(slurm, part, tmp_path, named):
    one = part()
    threads = [threading.Thread(target=SlurmBackend(named).start, args=(one,)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=TIMEOUT)
    here(one, tmp_path)
    end(one, tmp_path, 0)
    ours = SlurmBackend(named)
    assert until(ours, PartState.ENDED).code == 0
    wait_until(lambda: not slurm.call("squeue", "--noheader"))
    states = slurm.call(
        "squeue", "--noheader", "--states=all", f"--name={named}.job-g1-0", "--Format=State"
    )
    assert states.split().count("COMPLETED") == 1
    assert set(states.split()) <= {"COMPLETED", "CANCELLED"}


def test_clusters_and_users_do_not_see_the_parts_of_others(slurm, ours, part, tmp_path):
    one = part()
    ours.start(one)
    here(one, tmp_path)
    assert SlurmBackend("our").list() == ()
    SlurmBackend("our").stop(one.name, 0)
    assert seen(ours).state is PartState.RUNNING


def test_what_slurm_refuses_is_told_in_its_words(slurm, part, named):
    with pytest.raises(BackendError, match="invalid partition"):
        SlurmBackend(named, SlurmOptions(partition="nowhere")).start(part())
    with pytest.raises(BackendError, match="n9"):
        SlurmBackend(named).start(part(node="n9"))
    with pytest.raises(BackendError, match="asks for 3 accelerators, and n2 has 2"):
        SlurmBackend(named).start(part(accelerators=3))


# Stop --------------------------------------------------------------------------------------------


def test_a_part_that_is_stopped_gets_the_signal_itself(ours, part, tmp_path):
    one = part()
    ours.start(one)
    here(one, tmp_path)
    ours.stop(one.name, 30)
    found = until(ours, PartState.ENDED)
    assert found.code is None
    assert (tmp_path / one.name / "got").read_text() == str(int(signal.SIGUSR1))
    ours.stop(one.name, 30)  # it has ended
    ours.stop("job-g1-7", 30)  # nobody knows it
    assert seen(ours) == found


def test_a_part_that_does_not_leave_is_ended_at_once_when_asked_again(ours, part, tmp_path):
    one = part(how="deaf")
    ours.start(one)
    here(one, tmp_path)
    ours.stop(one.name, 600)
    wait_until((tmp_path / one.name / "got").exists)
    (tmp_path / one.name / "got").unlink()
    ours.stop(one.name, 500)  # a second signal would disturb it while it saves
    assert seen(ours).state is PartState.RUNNING
    ours.stop(one.name, 0)
    found = until(ours, PartState.ENDED)
    # Slurm may learn of its end before it is told to cancel it.
    assert "CANCELLED" in found.reason or found.code == 128 + signal.SIGKILL
    assert not (tmp_path / one.name / "got").exists()


def test_a_part_that_waits_is_gone_at_once_and_has_no_code(ours, part, tmp_path):
    first, second = part(accelerators=2), part("job-g1-1", accelerators=2)
    ours.start(first)
    here(first, tmp_path)
    ours.start(second)
    assert seen(ours, second.name).state is PartState.PENDING
    assert seen(ours, second.name).node == "n2"
    ours.stop(second.name, 60)
    assert until(ours, PartState.ENDED, second.name).code is None


# Nodes -------------------------------------------------------------------------------------------


def test_nodes_have_the_accelerators_that_others_leave(slurm, ours, part, tmp_path):
    assert [(node.name, node.accelerators, node.kind, node.leaves) for node in ours.nodes()] == [
        (f"n{number}", 2, "gpu", None) for number in (1, 2, 3, 4)
    ]
    wrap = ["--parsable", "--output=/dev/null", "--wrap=sleep 600"]
    slurm.call("sbatch", "--nodelist=n1", "--gres=gpu:1", *wrap)
    slurm.call("sbatch", "--nodelist=n2", "--exclusive", *wrap)
    slurm.call("sbatch", "--nodelist=n3", "--ntasks=5", "--nodes=1", *wrap)
    ours.start(part(node="n4"))
    here(part(node="n4"), tmp_path)
    wait_until(lambda: "PENDING" not in slurm.call("squeue", "--noheader", "--format=%T"))
    counts = {node.name: node.accelerators for node in ours.nodes()}
    # Five of eight CPUs are taken from n3: what is left is enough for one accelerator less.
    assert counts == {"n1": 1, "n2": 0, "n3": 0, "n4": 2}


def test_nodes_without_gpus_are_split_into_shares(
    tmp_path_factory, monkeypatch, part, tmp_path, named
):
    directory = tmp_path_factory.mktemp("cpus")
    with slurm_cluster(directory, num_nodes=1, accelerators=0) as bare:
        monkeypatch.setenv("SLURM_CONF", bare.environment["SLURM_CONF"])
        assert SlurmBackend(named).nodes() == ()
        ours = backend(named, {"accelerators": "2"})
        (node,) = ours.nodes()
        assert (node.accelerators, node.kind) == (2, "cpu")
        first, second, third = (part(f"job-g1-{number}", "n1") for number in range(3))
        ours.start(first)
        ours.start(second)
        here(first, tmp_path)
        here(second, tmp_path)
        assert ours.nodes()[0].accelerators == 2
        ours.start(third)
        time.sleep(1)
        assert seen(ours, third.name).state is PartState.PENDING


def test_a_drained_node_leaves_and_one_that_is_empty_is_gone(slurm, ours, part, tmp_path):
    one = part()
    ours.start(one)
    here(one, tmp_path)
    before = time.time()
    slurm.set_state("n2", "DRAIN")
    slurm.set_state("n3", "DRAIN")
    nodes = by_name(ours)
    assert set(nodes) == {"n1", "n2", "n4"}
    assert nodes["n2"].accelerators == 1  # what we have of it, and no more
    assert before - 2 < nodes["n2"].leaves <= time.time()
    assert nodes["n2"].leaves == by_name(ours)["n2"].leaves
    slurm.set_state("n3", "RESUME")
    wait_until(lambda: "n3" in by_name(ours))
    assert by_name(ours)["n3"].leaves is None


def test_a_reserved_node_leaves_before_and_a_part_on_it_ends_in_time(
    slurm, ours, part, tmp_path, named
):
    start = int(time.time()) + 600
    when = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(start))
    slurm.call(
        *("scontrol", "create", "reservation", "ReservationName=upkeep", "Users=root"),
        *(f"StartTime={when}", "Duration=60", "Nodes=n[1-2]", "Flags=MAINT,IGNORE_JOBS"),
    )
    try:
        nodes = by_name(ours)
        assert (nodes["n1"].leaves, nodes["n2"].leaves) == (start, start)
        assert nodes["n3"].leaves is None
        one = part()
        ours.start(one)
        here(one, tmp_path)
        limit = slurm.call("squeue", "--noheader", f"--name={named}.job-g1-0", "--Format=TimeLimit")
        assert limit.strip() in ("9:00", "10:00")
        only = SlurmBackend(named, SlurmOptions(reservation="upkeep"))
        # Its time has not come: nothing is to be had beside what we have.
        assert [(node.name, node.accelerators) for node in only.nodes()] == [("n2", 1)]
    finally:
        slurm.call("scancel", "--user=root")
        slurm.call("scontrol", "delete", "ReservationName=upkeep")


# What Slurm does to parts ------------------------------------------------------------------------


def test_the_part_of_a_node_that_is_set_down_has_ended_without_a_code(slurm, ours, part, tmp_path):
    one = part()
    ours.start(one)
    here(one, tmp_path)
    slurm.set_state("n2", "DOWN")
    found = until(ours, PartState.ENDED)
    assert found.code is None
    assert "NODE_FAIL" in found.reason
    assert "n2" not in by_name(ours)
    two = part("job-g1-1", "n3")
    ours.start(two)
    here(two, tmp_path)
    slurm.set_state("n2", "RESUME")
    time.sleep(2)
    assert seen(ours).state is PartState.ENDED  # Slurm does not bring it back


def test_a_part_that_another_job_displaces_is_asked_to_leave_first(slurm, part, tmp_path, named):
    ours = SlurmBackend(named, SlurmOptions(partition="spot"))
    one = part(accelerators=2)
    ours.start(one)
    here(one, tmp_path)
    slurm.call(
        *("sbatch", "--partition=main", "--nodelist=n2", "--exclusive", "--output=/dev/null"),
        "--wrap=sleep 600",
    )
    found = until(ours, PartState.ENDED)
    assert (tmp_path / one.name / "got").read_text() == str(int(signal.SIGUSR1))
    assert found.code is None  # it has not failed
    wait_until(lambda: by_name(ours)["n2"].accelerators == 0)


def test_a_time_limit_asks_the_part_to_leave_first(minutes):
    found = minutes.ended(minutes.limit, "job-g1-2")
    got = minutes.directory / "job-g1-2" / "got"
    assert got.read_text() == str(int(signal.SIGUSR1))
    assert found.code is None  # it has not failed


def test_slurm_keeps_the_time_of_grace_by_itself(minutes):
    assert (minutes.first, minutes.second, minutes.third) == ("2:00", "2:00", "1:00")
    # Nobody asks again: it ends by itself.
    assert "TIMEOUT" in minutes.ended(minutes.grace, "job-g1-1").reason


# Options -----------------------------------------------------------------------------------------


def test_options_are_checked():
    with pytest.raises(ValueError, match="'colour' is no option of Slurm: it has partition"):
        backend("ours", {"colour": "red"})
    with pytest.raises(ValueError, match=r"time \('1h'\) must be a whole number"):
        backend("ours", {"time": "1h"})
    with pytest.raises(ValueError, match="cluster"):
        backend("Ours", {})
