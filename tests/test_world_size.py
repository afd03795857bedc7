"""The marker ``world_size`` does what ``world.py`` promises.

What must pass is tested by use. What must not is run in an inner session, one for all of it as
most of its time goes into importing torch, whose JUnit report is then looked at test by test.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist

from tests import world

ROOT = Path(__file__).parents[1]
#: Ample for what is over in GRACE_SECONDS on an idle machine, and far from any other timeout.
SOON = 15.0
#: For what must happen, no matter how busy the machine is.
PATIENCE = 60.0

pytestmark = pytest.mark.timeout(300)  # the inner session may take a minute if the machine is busy


def is_alive(pid: int | str) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "XZ"


def listening_sockets() -> set[str]:
    """Those of this process, as it cannot know what others do with a port that it has closed."""
    tables = [path.read_text().splitlines() for path in Path("/proc/net").glob("tcp*")]
    rows = [line.split() for table in tables for line in table]
    listening = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}
    return listening & {os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_socket()}


def test_listening_sockets_are_seen() -> None:
    before = listening_sockets()
    with socket.create_server(("127.0.0.1", 0)):
        assert len(listening_sockets() - before) == 1


def wait_until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return met


# What must pass.


@pytest.mark.parametrize(
    "size", [pytest.param(n, marks=pytest.mark.world_size(n)) for n in (1, 2, 3, 4)]
)
def test_ranks_form_a_group(size: int) -> None:
    ranks = torch.zeros(size)
    ranks[dist.get_rank()] = 1
    dist.all_reduce(ranks)
    assert ranks.tolist() == [1] * size
    assert dist.get_backend() == "gloo"
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    assert [int(os.environ[name]) for name in names] == [dist.get_rank()] * 2 + [size] * 2


@pytest.mark.world_size(2)
def test_a_rank_computes_in_one_thread() -> None:
    threads = os.listdir("/proc/self/task")
    torch.ones(500, 500) @ torch.ones(500, 500)
    torch.ones(1_000_000).exp().sum()
    assert os.listdir("/proc/self/task") == threads
    assert torch.get_num_threads() == 1


@pytest.mark.world_size(1)
def test_a_rank_has_no_timer() -> None:
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_the_session_has_a_timer() -> None:
    assert signal.getitimer(signal.ITIMER_REAL)[0] > 0


@pytest.mark.world_size(2)
def test_a_rank_can_train() -> None:
    # Autograd has threads of its own, which do not survive a fork: a fork server may not use it.
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.full((1, 2), float(dist.get_rank()))).sum().backward()
    assert model.module.weight.grad.tolist() == [[0.5, 0.5]]


@pytest.mark.world_size(2)
class TestInAClass:
    @pytest.fixture(autouse=True, params=["x", "y"])
    def letter(self, request: pytest.FixtureRequest) -> None:
        self.letter = request.param

    @pytest.fixture
    def everyone(self) -> Iterator[int]:
        total = torch.ones(1)
        dist.all_reduce(total)  # fixtures may use the group, before the test and
        yield int(total)
        dist.all_reduce(total)  # after it

    @pytest.mark.parametrize("number", [1, 2])
    def test_with_fixtures_and_parameters(
        self, everyone: int, number: int, request: pytest.FixtureRequest
    ) -> None:
        assert everyone == dist.get_world_size() == 2
        assert f"[{self.letter}-{number}]" in request.node.name

    @pytest.mark.world_size(3)
    def test_the_closest_marker_counts(self) -> None:
        assert dist.get_world_size() == 3


@pytest.mark.world_size(2)
def test_shared_path_is_shared_and_tmp_path_is_not(shared_path: Path, tmp_path: Path) -> None:
    (shared_path / f"{dist.get_rank()}").write_text(str(tmp_path))
    dist.barrier()
    tmp_paths = {file.read_text() for file in shared_path.iterdir()}
    assert len(tmp_paths) == 2
    assert all(Path(path).is_dir() and not list(Path(path).iterdir()) for path in tmp_paths)
    assert shared_path.parent == tmp_path.parents[1]  # hence removed like any tmp_path


def test_shared_path_needs_no_world(shared_path: Path, tmp_path: Path) -> None:
    assert shared_path.is_dir()
    assert shared_path != tmp_path


@pytest.mark.world_size(2)
@pytest.mark.parametrize("time", ["first", "second"])
def test_worlds_are_new_each_time(time: str) -> None:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False)
    assert not store.check(["trace"])
    assert "TRACE" not in os.environ
    dist.barrier()
    store.set("trace", time)
    os.environ["TRACE"] = time


@pytest.mark.world_size(2, init=False)
def test_the_group_can_be_left_to_the_test() -> None:
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    assert dist.get_world_size() == 2


@pytest.mark.world_size(3, init=False)
def test_a_group_can_be_formed_again() -> None:
    # torch leaves the addresses of a group in the store, where a second one would find them.
    rank, host, port = (os.environ[name] for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    for size in (3, 2, 1):
        if int(rank) >= size:
            return
        store = dist.TCPStore(host, int(port), is_master=False)
        store = dist.PrefixStore(f"world of {size}", store)
        dist.init_process_group("gloo", store=store, rank=int(rank), world_size=size)
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == size
        dist.destroy_process_group()


@pytest.mark.world_size(2)
def test_no_rank_leaves_before_its_peers_are_done(shared_path: Path) -> None:
    if dist.get_rank() == 0:
        (shared_path / "pid").write_text(str(os.getpid()))
        dist.barrier()
    else:
        dist.barrier()
        time.sleep(1)
        assert is_alive(int((shared_path / "pid").read_text()))


# What must not pass.

INNER_CONFTEST = """
import os, pytest
from tests.conftest import *
from tests.conftest import world

del world.PRELOAD[-3:]  # takes seconds, and is not used here

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    return (world.in_rank() and item.name == "test_nobody_runs") or None

@pytest.fixture(autouse=True)
def note(request):
    def note(pid):
        with open(request.config.rootpath / "notes", "a") as file:
            print(request.node.name, pid, file=file)
    note(os.getpid())
    return note
"""

INNER_TESTS = """
import multiprocessing.util, os, signal, subprocess, threading, time, uuid, warnings
import pytest, torch, torch.distributed as dist
from tests.test_world_size import is_alive, listening_sockets

pair = pytest.mark.world_size(2)
kept = []

@pair
def test_passes(note):
    kept.append(subprocess.Popen(["sleep", "1000"]))
    note(kept[-1].pid)

@pair
def test_assert():
    print("printed by", dist.get_rank())
    answer = torch.tensor(41 + dist.get_rank())
    assert answer.item() == 41

@pair
def test_peer_waits_in_a_collective():
    if dist.get_rank() == 1:
        raise LookupError("the culprit")
    dist.barrier()

@pair
def test_peer_waits_for_nothing():
    if dist.get_rank() == 1:
        raise LookupError("the culprit")
    time.sleep(1000)

@pair
def test_sigkill():
    if dist.get_rank() == 1:
        print("last words")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()

@pair
def test_exit_code():
    if dist.get_rank() == 0:
        os._exit(7)
    dist.barrier()

@pair
def test_exit_without_a_word():
    if dist.get_rank() == 0:
        os._exit(0)

@pair
def test_dies_after_it_passed():
    if dist.get_rank() == 0:
        multiprocessing.util.Finalize(None, os._exit, args=(3,), exitpriority=0)

@pair
def test_session_is_ended():
    if dist.get_rank() == 0:
        pytest.exit("enough")
    dist.barrier()

@pair
@pytest.mark.timeout(6)
def test_hangs(capfd):
    def snooze():
        time.sleep(1000)
    if dist.get_rank() == 1:
        snooze()

@pair
@pytest.mark.timeout(20)
def test_hangs_after_it_passed():
    def linger():
        time.sleep(1000)
    if dist.get_rank() == 1:
        threading.Thread(target=linger).start()

@pytest.fixture
def faulty():
    if dist.get_rank() == 1:
        raise LookupError("in a fixture")

@pair
def test_setup(faulty):
    dist.barrier()

@pytest.fixture
def untidy():
    yield
    if dist.get_rank() == 1:
        raise LookupError("in a finalizer")

@pair
def test_teardown(untidy):
    pass

@pair
def test_warning():
    if dist.get_rank() == 1:
        warnings.warn("take care")

@pair
@pytest.mark.parametrize("never", [uuid.uuid4().hex])
def test_of_another_name_each_time(never):
    pass

@pair
def test_nobody_runs():
    pass

@pair
def test_skip():
    pytest.skip("not today")

@pair
def test_skip_of_one():
    if dist.get_rank() == 1:
        pytest.skip("not today")

@pair
@pytest.mark.skip(reason="not at all")
def test_skip_marker():
    pass

@pair
@pytest.mark.xfail(reason="known")
def test_xfail():
    assert dist.get_rank() == 0

@pair
@pytest.mark.xfail(reason="known", raises=LookupError)
def test_xfail_raises():
    if dist.get_rank() == 1:
        raise LookupError
    dist.barrier()

@pair
@pytest.mark.xfail(reason="known", raises=KeyError)
def test_xfail_raises_another():
    if dist.get_rank() == 1:
        raise LookupError
    dist.barrier()

@pair
@pytest.mark.xfail(reason="known")
def test_xfail_passes():
    pass

@pair
@pytest.mark.xfail(reason="known")
def test_xfail_dies():
    os.kill(os.getpid(), signal.SIGKILL)

@pair
def test_xfail_called():
    pytest.xfail("on second thoughts")

def test_nothing_is_left(request):
    lines = (request.config.rootpath / "notes").read_text().splitlines()
    names, pids = zip(*[line.split() for line in lines])
    assert names.count("test_passes") == 4, "two ranks, a child of each"
    assert [name for name, pid in zip(names, pids) if int(pid) == os.getpid()] == [names[-1]]
    assert [pid for pid in pids[:-1] if is_alive(pid)] == []
    assert listening_sockets() == set()
"""


class Case(NamedTuple):
    """What the inner session says about one of its tests."""

    status: str
    text: str
    output: str
    seconds: float


@contextlib.contextmanager
def inner_session(path: Path, tests: str) -> Iterator[subprocess.Popen[bytes]]:
    (path / "conftest.py").write_text(INNER_CONFTEST)
    (path / "test_inner.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", path, "--rootdir", path, "--basetemp", path / "tmp"]
    command += ["-c", ROOT / "pyproject.toml", "-p", "no:cacheprovider"]
    command += ["--junit-xml", path / "report.xml", "-o", "junit_logging=all"]
    environ = {name: os.environ[name] for name in os.environ if name != "PYTHONUNBUFFERED"}
    with (
        (path / "output").open("w") as output,
        subprocess.Popen(command, cwd=path, env=environ, stdout=output, stderr=output) as session,
    ):
        try:
            yield session
        finally:
            session.kill()


def read_report(path: Path) -> dict[str, Case]:
    cases = {}
    for element in ElementTree.parse(path / "report.xml").iter("testcase"):
        status, text = "passed", ""
        for child in element:
            if child.tag in ("failure", "error", "skipped"):
                status = "xfailed" if child.get("type") == "pytest.xfail" else child.tag
                text = f"{child.get('message')}\n{child.text}"
        output = element.findtext("system-out") or ""
        name = element.get("name").partition("[")[0]
        cases[name] = Case(status, text, output, float(element.get("time")))
    return cases


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    path = tmp_path_factory.mktemp("inner")
    with inner_session(path, INNER_TESTS) as session:
        assert session.wait() == pytest.ExitCode.TESTS_FAILED, (path / "output").read_text()
    return read_report(path)


@pytest.mark.nightly(part="jobs")
def test_cases_are_all_looked_at(cases: dict[str, Case]) -> None:
    assert len(cases) == INNER_TESTS.count("\ndef test_")


@pytest.mark.nightly(part="jobs")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("assert", "rank 1 of 2 failed in call: assert 42 == 41"),
        ("assert", "E        +  where 42 = <built-in method item"),
        ("assert", "rank 0: passed"),
        ("peer_waits_in_a_collective", "rank 1 of 2 failed in call: LookupError: the culprit"),
        ("peer_waits_in_a_collective", "rank 0: failed in call: RuntimeError"),
        ("peer_waits_for_nothing", "rank 1 of 2 failed in call: LookupError: the culprit"),
        ("peer_waits_for_nothing", "rank 0: killed"),
        ("sigkill", "rank 1 of 2 died on SIGKILL"),
        ("exit_code", "rank 0 of 2 died with exit code 7"),
        ("exit_without_a_word", "rank 0 of 2 died with exit code 0"),
        ("dies_after_it_passed", "rank 0 of 2 died with exit code 3, though it passed"),
        ("session_is_ended", "rank 0 of 2 failed on _pytest.outcomes.Exit: enough"),
        ("hangs", "rank 1 of 2 was stuck when time was up"),
        ("hangs", "rank 0: passed"),
        ("hangs_after_it_passed", "rank 1 of 2 was stuck when time was up, though it passed"),
        ("setup", "rank 1 of 2 failed in setup: LookupError: in a fixture"),
        ("setup", "def faulty():"),
        ("teardown", "rank 1 of 2 failed in teardown: LookupError: in a finalizer"),
        ("warning", "rank 1 of 2 failed in call: UserWarning: take care"),
        ("of_another_name_each_time", "failed to run the test: pytest ended with <ExitCode.USAGE"),
        ("nobody_runs", "failed to run the test: pytest ended with <ExitCode.OK"),
        ("skip_of_one", "ranks disagree on whether to skip"),
        ("xfail_raises_another", "rank 1 of 2 failed in call: LookupError"),
        ("xfail_passes", "[XPASS(strict)] known"),
    ],
)
def test_a_failure_says_why(cases: dict[str, Case], name: str, text: str) -> None:
    assert cases[f"test_{name}"].status == "failure"
    assert text in cases[f"test_{name}"].text


@pytest.mark.nightly(part="jobs")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("assert", "printed by 0"),
        ("assert", "printed by 1"),
        ("sigkill", "last words"),
        ("hangs", "in snooze"),
        ("hangs_after_it_passed", "in linger"),
        ("of_another_name_each_time", "not found"),
    ],
)
def test_the_output_of_ranks_is_that_of_the_test(
    cases: dict[str, Case], name: str, text: str
) -> None:
    assert text in cases[f"test_{name}"].output


@pytest.mark.nightly(part="jobs")
@pytest.mark.parametrize(
    ("name", "status", "text"),
    [
        ("skip", "skipped", "not today"),
        ("skip_marker", "skipped", "not at all"),
        ("xfail", "xfailed", "known"),
        ("xfail_raises", "xfailed", "known"),
        ("xfail_dies", "xfailed", "known"),
        ("xfail_called", "xfailed", "on second thoughts"),
    ],
)
def test_skip_and_xfail_keep_their_meaning(
    cases: dict[str, Case], name: str, status: str, text: str
) -> None:
    assert cases[f"test_{name}"].status == status
    assert text in cases[f"test_{name}"].text


@pytest.mark.nightly(part="jobs")
def test_failures_are_reported_soon(cases: dict[str, Case]) -> None:
    # The first one that passes waits until torch is imported, however long the machine takes.
    failures = {name: case for name, case in cases.items() if case.status != "passed"}
    assert {name: case for name, case in failures.items() if case.seconds > SOON} == {}
    assert cases["test_hangs"].seconds < 6  # its timeout


@pytest.mark.nightly(part="jobs")
@pytest.mark.parametrize("name", ["passes", "nothing_is_left"])
def test_nothing_is_left_after_a_test(cases: dict[str, Case], name: str) -> None:
    assert (cases[f"test_{name}"].text, cases[f"test_{name}"].status) == ("", "passed")


INNER_STUCK = """
import os, subprocess, time
import pytest

@pytest.mark.world_size(2)
def test_stuck(shared_path):
    child = subprocess.Popen(["sleep", "1000"])
    (shared_path / "ready").open("a").write("x")
    if os.environ["RANK"] == "0":
        3 ** 10**9  # takes minutes, during which the interpreter does nothing else
    time.sleep(1000)
"""


def descendants(pid: int) -> set[int]:
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # gone since the glob
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


@pytest.mark.nightly(part="jobs")
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("ending", ["SIGKILL", "SIGINT"])
def test_nothing_is_left_after_a_session(tmp_path: Path, ending: str) -> None:
    with inner_session(tmp_path, INNER_STUCK) as session:
        assert wait_until(
            lambda: [path.read_text() for path in tmp_path.rglob("ready")] == ["xx"]
        ), (tmp_path / "output").read_text()
        started = descendants(session.pid)
        assert len(started) >= 5  # the fork server, two ranks and a child of each
        heavy = [p for p in started if "tracker" not in Path(f"/proc/{p}/cmdline").read_text()]
        session.send_signal(signal.Signals[ending])
        code = session.wait()
        # A session that did not receive the signal would end by its own time limit.
        assert code == (pytest.ExitCode.INTERRUPTED if ending == "SIGINT" else -signal.SIGKILL)
        if ending == "SIGINT":
            assert [pid for pid in heavy if is_alive(pid)] == []
        assert wait_until(lambda: not any(map(is_alive, started)))


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        (pytest.mark.world_size(0), "not 0"),
        (pytest.mark.world_size(-1), "not -1"),
        (pytest.mark.world_size(True), "not True"),
        (pytest.mark.world_size(2.0), "not 2.0"),
        (pytest.mark.world_size("2"), "not '2'"),
        (pytest.mark.world_size, "missing"),
        (pytest.mark.world_size(2, 3), "takes 1"),
        (pytest.mark.world_size(2, init="no"), "not 'no'"),
        (pytest.mark.world_size(2, backend="nccl"), "backend"),
    ],
)
def test_a_marker_is_checked(
    request: pytest.FixtureRequest, marker: pytest.MarkDecorator, message: str
) -> None:
    request.node.add_marker(marker)
    with pytest.raises(pytest.UsageError, match=f"world_size: .*{re.escape(message)}"):
        world.world_of(request.node)


def test_all_markers_are_checked_before_a_test_is_run(tmp_path: Path) -> None:
    tests = """
        import pytest, unittest

        def test_fine():
            print("was run")

        @pytest.mark.world_size(2)
        class TestCase(unittest.TestCase):
            def test_not_a_plain_function(self):
                pass
    """
    with inner_session(tmp_path, textwrap.dedent(tests)) as session:
        assert session.wait() == pytest.ExitCode.USAGE_ERROR
    output = (tmp_path / "output").read_text()
    assert "test_not_a_plain_function: mark.world_size: only a plain test function" in output
    assert "collected 2 items" in output
    assert "was run" not in output
    assert "passed" not in output
