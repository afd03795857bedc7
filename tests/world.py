"""Run the body of one test in several real processes that form a gloo group.

Most of what this library promises is about what several processes agree on, so its tests need
processes: real ones, since threads share the very state whose divergence is the bug. The marker
``world_size(n)`` (its hooks are in ``conftest.py``) has to be as easy as a plain test, or it would
be avoided, and fast, for it is used hundreds of times. Hence:

* Ranks are forked from a *fork server* that has imported torch and resilin but never run them. A
  rank starts in milliseconds and inherits no thread of the test session.
* A rank runs ``pytest.main`` on the one node id, so fixtures, parameters and rewritten asserts are
  pytest's own; there is no second way of running a test to keep in step with the first.
* The session hosts the rendezvous store, on a port the kernel picked: no port is guessed, and no
  rank has to outlive the others to keep the store alive.
* Blame goes to the rank that broke first. Its peers break later, in a collective that lost a
  member, and what they have to say would hide the cause.
* Nothing survives. A rank leads a process group, which the session kills when the test is over
  and the kernel kills when the session itself dies.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Generator, Sequence
from datetime import timedelta
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from _pytest.config import default_plugins

# torch is imported where it is used: a session without a world should not wait seconds for it.

#: Variables by which a launcher tells a process its place.
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: Set in ranks only: it is how code knows that it runs in one. Holds the shared directory.
RANK_ENV = "RESILIN_TEST_RANK_SHARED_PATH"
#: What ranks find imported. DistributedDataParallel and optimizers import _dynamo (seconds).
PRELOAD = ["pytest", *(f"_pytest.{name}" for name in default_plugins)]
PRELOAD += ["torch", "torch.distributed", "torch._dynamo"]
PRELOAD += ["resilin.training.parallel", "resilin.training.loader"]
#: The plugins that ranks have. To look for others takes longer than many tests.
PLUGINS = ("pytest_timeout", "_hypothesis_pytestplugin")
#: How long a collective waits for a peer: less than a test may take, as its error tells more.
COLLECTIVE_TIMEOUT = timedelta(seconds=60)
#: How long the peers of a broken rank may go on, to show how that broke them.
GRACE_SECONDS = 2.0
#: What is kept of a test's timeout for collecting the stacks of stuck ranks.
REPORT_SECONDS = 5.0
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
#: Makes a rank print its stacks. Not SIGUSR1: the code under test may want that one.
STACK_SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR2)
STACK_SECONDS = 0.5
#: How much of the end of a rank's output a failure shows.
OUTPUT_CHARACTERS = 20_000
RULE = "-" * 30

PASSED, SKIPPED, XFAILED, FAILED = "passed", "skipped", "xfailed", "failed"
DIED, STUCK, KILLED = "died", "was stuck", "killed"
BROKEN = frozenset({XFAILED, FAILED, DIED, STUCK})


class World(NamedTuple):
    """What a ``world_size`` marker asks for."""

    size: int
    init: bool


class Outcome(NamedTuple):
    """How a rank ended, in a line and in full, and when: all processes share one clock."""

    status: str
    line: str = ""
    text: str = ""
    when: float = 0.0

    def __str__(self) -> str:
        return f"{self.status} {self.line}".rstrip()


def in_rank() -> bool:
    return RANK_ENV in os.environ


def world_of(item: pytest.Item) -> World | None:
    """The world that the item has to be run in, None if it is to be run as it is."""
    mark = item.get_closest_marker("world_size")
    if mark is None or in_rank():
        return None

    def world_size(size: Any, *, init: Any = True) -> World:
        if type(size) is not int or size < 1:
            raise TypeError(f"the size must be an int >= 1, not {size!r}")
        if type(init) is not bool:
            raise TypeError(f"init must be a bool, not {init!r}")
        if type(item) is not pytest.Function:
            raise TypeError(f"only a plain test function can be run, not a {type(item).__name__}")
        return World(size, init)

    try:
        return world_size(*mark.args, **mark.kwargs)
    except TypeError as error:
        raise pytest.UsageError(f"{item.nodeid}: mark.world_size: {error}") from None


def deadline_for(timeout: float) -> float:
    return time.monotonic() + max(timeout - REPORT_SECONDS, 0.75 * timeout)


def start_fork_server(also: Sequence[str] = ()) -> None:
    """Begin to import what ranks need, in the background. Once is enough.

    Args:
        also: More modules. They stay until a call of `stop_fork_server`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # torch reads it once, when loaded
        forkserver.set_forkserver_preload([*PRELOAD, *also])
        forkserver.ensure_running()


def stop_fork_server() -> None:
    """End what was started, at once: it would take seconds to clear torch away."""
    server = forkserver._forkserver  # there is no public way
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()


def run_world(item: pytest.Function, world: World, scratch: Path, deadline: float | None) -> None:
    """Run the item in a new world; return, fail, skip or xfail as its ranks do."""
    from torch.distributed import TCPStore

    (shared := scratch / "shared").mkdir()
    start_fork_server()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environ = {
        **os.environ,
        RANK_ENV: str(shared),
        "WORLD_SIZE": str(world.size),
        "LOCAL_WORLD_SIZE": str(world.size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 too is but a client of the store
        "GLOO_SOCKET_IFNAME": LOOPBACK,  # or gloo asks what the host's name resolves to
        "OMP_NUM_THREADS": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    ranks: list[Rank] = []
    try:
        with contextlib.ExitStack() as stack:
            for number in range(world.size):
                environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
                ranks.append(Rank(number, world, _arguments(item), environ, scratch))
                stack.callback(ranks[-1].end)
            _watch(ranks, deadline)
    finally:
        del store  # or the traceback of a failure would keep its port open
    for rank in ranks:
        rank.echo()
    _conclude(ranks)


def _arguments(item: pytest.Function) -> list[str]:
    """What makes pytest run this item, without a word, and otherwise as this session would."""
    config, option = item.config, item.config.getoption
    verbosity = config.get_verbosity(pytest.Config.VERBOSITY_ASSERTIONS)
    arguments = [
        f"{item.path}::{item.nodeid.partition('::')[2]}",
        f"--rootdir={config.rootpath}",
        f"--import-mode={option('importmode')}",
        f"--tb={option('tbstyle')}",
        f"--override-ini=verbosity_assertions={verbosity}",
        *("-pno:cacheprovider", *(f"-p{plugin}" for plugin in PLUGINS)),
        *("--capture=no", "--verbosity=-2", "--no-summary"),
        *("-k", "", "-m", ""),  # the session has selected already
        # Plugins that the fork server has imported for another reason, and that no test needs.
        *("-W", "ignore::pytest.PytestAssertRewriteWarning"),
    ]
    arguments += [f"--config-file={config.inipath}"] if config.inipath else []
    arguments += [f"--{flag}" for flag in ("runxfail", "showlocals") if option(flag)]
    for flag, name in (("-p", "plugins"), ("-o", "override_ini"), ("-W", "pythonwarnings")):
        for value in option(name) or ():
            arguments += [flag, value]
    return arguments


class Rank:
    """One process of a world, as the session sees it."""

    def __init__(
        self,
        number: int,
        world: World,
        arguments: list[str],
        environ: dict[str, str],
        scratch: Path,
    ) -> None:
        self.name = f"rank {number}"
        self.exitcode: int | None = None
        self.outcome: Outcome | None = None
        self.log = scratch / f"rank{number}.log"
        self.log.touch()
        arguments = [*arguments, f"--basetemp={scratch / f'rank{number}'}"]
        self.line, remote = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("forkserver").Process(
            target=rank_main, args=(world, arguments, environ, self.log, remote), name=self.name
        )
        self.process.start()
        remote.close()  # held open here, it would never be seen to close

    @property
    def broken(self) -> bool:
        return self.outcome is not None and self.outcome.status in BROKEN

    def listen(self) -> None:
        """Take in what the process has said, and whether it has gone."""
        self.exitcode = self.process.exitcode  # first: it speaks, then goes
        if not self.line.closed and self.line.poll():
            try:
                self.outcome = self.line.recv()
            except EOFError:
                self.line.close()
        code = self.exitcode
        if code is None or self.broken or (code == 0 and self.outcome):
            return
        how = f"on {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        # Peers do not kill a rank in its test, whereas its death breaks them: it came before.
        self.replace(DIED, how, time.monotonic() if self.outcome else 0.0)

    def replace(self, status: str, line: str, when: float) -> None:
        """Note what became of the process, whatever it said before."""
        but = f", though it {self.outcome}" if self.outcome else ""
        self.outcome = Outcome(status, line + but, when=when)

    def end(self) -> None:
        """Kill the process and all it started, and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError):  # as a rule all have left by now
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # it may not lead a group yet
        self.process.join()
        self.process.close()
        self.line.close()

    def echo(self) -> None:
        """Print what the process wrote: it is the output of the test, so pytest captures it."""
        output = self.log.read_text(errors="replace").strip()[-OUTPUT_CHARACTERS:]
        if output:
            print(f"{RULE} {self.name} {RULE}\n{output}")


def _watch(ranks: Sequence[Rank], deadline: float | None) -> None:
    """Wait until every rank has gone, or has had its time; each has an outcome then.

    No rank goes before all are done, as a peer may still have a collective to finish with it.
    """
    grace = None
    while running := [rank for rank in ranks if rank.exitcode is None]:
        limits = [limit for limit in (grace, deadline) if limit is not None]
        seconds = min(limits) - time.monotonic() if limits else None
        if seconds is not None and seconds <= 0:
            break
        lines = [rank.line for rank in running if not rank.line.closed]
        connection.wait([*lines, *(rank.process.sentinel for rank in running)], seconds)
        for rank in running:
            rank.listen()
        broken = any(rank.broken for rank in ranks)
        if broken and grace is None:
            grace = time.monotonic() + GRACE_SECONDS
        if broken or all(rank.outcome for rank in ranks):
            for rank in ranks:
                if rank.outcome:
                    rank.line.close()  # the rank waits for this before it goes
    if grace is not None:
        for rank in running:
            if rank.outcome is None:
                rank.replace(KILLED, f"{GRACE_SECONDS:g} s after the first rank broke", grace)
        return
    stuck = [rank for rank in running if rank.outcome is None or rank.line.closed]
    for rank in stuck:
        rank.replace(STUCK, "when time was up", time.monotonic())
        with contextlib.suppress(ProcessLookupError):  # it went this very moment
            os.kill(rank.process.pid, STACK_SIGNAL)
    if stuck:
        time.sleep(STACK_SECONDS)


def _conclude(ranks: Sequence[Rank]) -> None:
    """Make the outcomes of the ranks that of the test."""
    __tracebackhide__ = True
    statuses = [rank.outcome.status for rank in ranks]
    if set(statuses) == {PASSED}:
        return
    if set(statuses) == {SKIPPED}:
        raise pytest.skip.Exception(ranks[0].outcome.line, _use_item_location=True)
    broken = sorted((rank for rank in ranks if rank.broken), key=lambda rank: rank.outcome.when)
    if broken and broken[0].outcome.status == XFAILED:
        pytest.xfail(broken[0].outcome.line)
    told = ["ranks disagree on whether to skip"]
    if broken:
        first = broken[0]
        told = [f"{first.name} of {len(ranks)} {first.outcome}", first.outcome.text]
    told += [f"{RULE} all ranks {RULE}", *(f"{rank.name}: {rank.outcome}" for rank in ranks)]
    pytest.fail("\n".join(told), pytrace=False)


# From here on: what happens in a rank.


def rank_main(
    world: World,
    arguments: list[str],
    environ: dict[str, str],
    log: Path,
    line: connection.Connection,
) -> None:
    output = log.open("ab")
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)  # a rank that is killed flushes nothing
    faulthandler.register(STACK_SIGNAL, file=output, all_threads=True)
    _die_with_session()
    os.environ.clear()  # those of the fork server are old
    os.environ.update(environ)
    # As in a script. Children of a fork server would have one of their own, and each worker of a
    # DataLoader would import torch again.
    multiprocessing.set_start_method(None, force=True)
    gc.freeze()  # pytest collects garbage often, and the preload is a second's worth of it

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    reporter = Reporter(line, world.init)
    reporter.finish(pytest.main(arguments, plugins=[reporter]))
    line.poll(None)  # until the session closes it
    if dist.is_initialized():
        dist.destroy_process_group()


def _die_with_session() -> None:
    """Lead a process group, and have the kernel kill it when the session is gone.

    The session holds the other end of this pipe, so its death is an event on it. The usual
    PR_SET_PDEATHSIG would not do: the parent of a rank is the fork server, which lives for as long
    as its clients, and ranks count as such.
    """
    os.setsid()
    if sys.platform == "linux":
        session = multiprocessing.parent_process()
        fcntl.fcntl(session.sentinel, fcntl.F_SETOWN, -os.getpid())
        fcntl.fcntl(session.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(session.sentinel, fcntl.F_SETFL, os.O_ASYNC)
        if not session.is_alive():  # it went before anyone asked to be told
            os.killpg(0, signal.SIGKILL)


class Reporter:
    """The pytest plugin of a rank: makes the process group, tells the session the outcome."""

    def __init__(self, line: connection.Connection, init: bool) -> None:
        self.line = line
        self.init = init
        self.called = False
        self.outcome: Outcome | None = None

    @pytest.hookimpl(tryfirst=True)  # before the fixtures, which may want to use the group
    def pytest_runtest_setup(self) -> None:
        if self.init:
            from torch.distributed import init_process_group

            init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # around the plugin that knows about xfail
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        when = time.monotonic()
        report = yield
        if call.excinfo is None:
            self.called |= call.when == "call"
        elif hasattr(report, "wasxfail"):
            self.tell(Outcome(XFAILED, report.wasxfail, "", when))
        elif report.skipped:
            self.outcome = self.outcome or Outcome(SKIPPED, str(call.excinfo.value))
        else:
            error = call.excinfo.exconly(tryshort=True).partition("\n")[0]
            logs = (f"{RULE} {title} {RULE}\n{text}" for title, text in report.sections)
            text = "\n".join([report.longreprtext, *logs])
            self.tell(Outcome(FAILED, f"in {call.when}: {error}", text, when))
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.tell(Outcome(FAILED, "in collection", report.longreprtext, time.monotonic()))

    def pytest_internalerror(self, excrepr: object) -> None:
        self.tell(Outcome(FAILED, "in pytest itself", str(excrepr), time.monotonic()))

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self.tell(Outcome(FAILED, f"on {excinfo.exconly()}", "", time.monotonic()))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:  # nobody reads the summary, for which plugins import a lot
            session.config.pluginmanager.unregister(name="terminalreporter")

    def pytest_report_teststatus(self) -> tuple[str, str, str]:
        return "", "", ""  # the output is for the test alone

    def tell(self, outcome: Outcome) -> None:
        """Tell at once that this rank is broken, and only the first time: the rest follows."""
        if self.outcome is None or self.outcome.status not in BROKEN:
            self.outcome = outcome
            self.line.send(outcome)

    def finish(self, status: int | pytest.ExitCode) -> None:
        # An unexpected pass counts as a failure here. It is for the session to judge, as the
        # failure that the test expects may be that of another rank.
        ended = status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if self.outcome is None and self.called and ended:
            self.outcome = Outcome(PASSED)
        if self.outcome is None or not ended:
            line = f"to run the test: pytest ended with {status!r}"
            self.tell(Outcome(FAILED, line, when=time.monotonic()))
        elif self.outcome.status not in BROKEN:
            self.line.send(self.outcome)
