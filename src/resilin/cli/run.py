"""`resilin run`: torchrun, set up so that a job recovers fast and reports what happens to it.

torch's own launcher starts torch's own agent. Two things are added: the environment variables that
tell the processes of the job where their state is stored, and the in-memory directory, which
outlives workers and agents but not a job that has finished.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import shutil
import signal
import socket
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch.distributed.launcher.api as launcher
import torch.distributed.run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
)

from resilin.cli import preflight, warm
from resilin.cli.agent import ReportingAgent
from resilin.cli.errors import GaveUp, ScriptNotLive, say, told
from resilin.cli.faults import record
from resilin.cli.hang import Watchdog, ending, furthest, left_early
from resilin.cli.memory import MemoryDirectory
from resilin.cli.options import complete, hang_timeout, meeting, parser, stop_signals
from resilin.cli.stopping import StopSignals
from resilin.compat.torch_agent import use_agent
from resilin.engine import environment

OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""torch's setting that gives workers a separate store (1): with the store of the agents, a machine
that joins later ends the job."""
MAX_RESTARTS = 1000
"""Default limit of restarts. On each machine, the loss of any other machine counts as one."""
FAREWELL = 2.0
"""Seconds for which a closed job keeps answering; waiting machines ask once a second."""


def main(arguments: Sequence[str]) -> int:
    """Run this machine's part of the job until it is over.

    Returns:
        0 if the job finished, 1 if it failed, 2 if it cannot be started as asked, 128 + N if signal
        N stopped it; that of `--left-code` if its script left the loop over epochs before its end.
    """
    ours = parser()
    args = ours.parse_args(arguments)
    try:
        complete(args)
    except ValueError as error:
        ours.error(str(error))
    try:
        preflight.check(args)
    except (OSError, ValueError, ImportError) as error:
        say(told(error))
        return 2
    # A limit that the user sets is obeyed exactly; the default only bounds a long series of faults.
    bound = args.max_restarts is None
    args.max_restarts = MAX_RESTARTS if bound else args.max_restarts
    _quiet()
    stop = StopSignals()
    stop.install()  # torch installs its handlers with the first workers
    memory: MemoryDirectory | None = None
    code, ended, left = 1, False, None
    try:
        with _held(stop):
            # Or a signal that arrives right now would leave a directory that nobody removes.
            memory = prepare(args)
            os.environ[environment.PULSE_DIR] = _pulse_directory(memory)
        if not args.live or not _run_live(args, bound_fruitless=bound):
            _run_agent(args, stop, bound_fruitless=bound)
        ended, left = True, left_early(_pulses())
        code = 0 if left is None else args.left_code
        if left is not None:
            record("left", ending(_pulses()).removeprefix("ended "))
    except SignalException as raised:
        # Those of a live job have other handlers.
        number = stop.first or raised.sigval
        shown = furthest(_pulses())
        say(f"stopped by {number.name}" + ("" if shown is None else f" after step {shown.steps}"))
        record("stopped", f"by {number.name}")
        code = 128 + number
    except ChildFailedError:
        pass  # the agent has reported it
    except GaveUp as reason:
        say(str(reason))
        record("gave_up", str(reason))
    except RendezvousClosedError:
        say(f"job {args.rdzv_id} is closed: it finished or failed on another machine")
    except RendezvousConnectionError:
        say(
            f"no answer from {args.rdzv_endpoint}, the rendezvous endpoint of the job: the machine "
            "it names must take part, and be reachable from this one"
        )
    except Exception as error:
        if os.environ[environment.LOG] == "DEBUG":
            traceback.print_exc()
        say(f"failed: {type(error).__name__}: {error} (RESILIN_LOG=DEBUG shows where)")
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)  # only a short cleanup is left
    shutil.rmtree(os.environ.pop(environment.PULSE_DIR, ""), ignore_errors=True)
    if memory is not None:
        stopped = code > 128 and not ended and environment.CHECKPOINT_DIR in os.environ
        kept = ended and (left is None or left.saved)
        _leave(memory, args.rdzv_id, kept=kept or stopped)
    return code


def _pulses() -> Path:
    return Path(os.environ.get(environment.PULSE_DIR, os.devnull))


def _run_live(args: argparse.Namespace, *, bound_fruitless: bool) -> bool:
    """Run a live job until it is over.

    Returns:
        Whether the script can be live; if it cannot, its processes are gone.
    """
    from resilin.cli.live import job

    directory = Path(os.environ[environment.PULSE_DIR])
    try:
        job.run(args, directory, bound_fruitless=bound_fruitless)
    except ScriptNotLive as reason:
        say(f"not live: {reason}")
        say("the job runs as without --live: a worker that is lost restarts the others")
        return False
    return True


def _run_agent(args: argparse.Namespace, stop: StopSignals, *, bound_fruitless: bool) -> None:
    """Run torch's agent until the job is over, or this machine has left it."""
    watchdog = Watchdog(Path(os.environ[environment.PULSE_DIR]), hang_timeout(args))
    use_agent(
        partial(
            ReportingAgent,
            watchdog=watchdog,
            stop=stop,
            bound_fruitless=bound_fruitless,
            farewell=FAREWELL if is_here(args.rdzv_endpoint) else 0,
        )
    )
    config, entrypoint, arguments = torchrun.config_from_args(args)
    if args.warm:
        os.environ[environment.AGENT] = str(os.getpid())
        config.start_method = "forkserver"
        entrypoint = warm.run_script
        arguments = [args.training_script, *args.training_script_args]
        warm.start_server()
    launcher.elastic_launch(config, entrypoint)(*arguments)


def is_here(endpoint: str) -> bool:
    """Whether this machine hosts the rendezvous of the job."""
    host, _, port = endpoint.rpartition(":")
    if port == "0":
        return False  # nobody else knows the port
    try:
        address = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(address[0], address[1]) as listener:
            listener.bind(address[4])
    except OSError:
        return False
    return True


def prepare(args: argparse.Namespace) -> MemoryDirectory | None:
    """Set the environment of the workers, and create their in-memory directory.

    A directory that the environment already names is left to whoever set it.
    """
    os.environ.setdefault(OWN_STORE, "1")
    os.environ.setdefault(environment.LOG, "INFO")
    if args.checkpoint_dir:
        os.environ[environment.CHECKPOINT_DIR] = args.checkpoint_dir
    if args.checkpoint_every:
        os.environ[environment.CHECKPOINT_EVERY] = args.checkpoint_every
    if args.run_dir is not None or environment.RUN_DIR not in os.environ:
        place = args.run_dir or str(Path(environment.RUNS, args.rdzv_id))
        off = place == environment.OFF
        os.environ[environment.RUN_DIR] = place if off else str(Path(place).absolute())
        if not off:
            say(f"writing events to {place}; to watch: resilin top {shlex.quote(place)}")
    if args.memory_dir == environment.OFF:
        os.environ[environment.MEMORY_DIR] = environment.OFF
        return None
    if args.memory_dir is None and environment.MEMORY_DIR in os.environ:
        return None
    parent = Path(args.memory_dir) if args.memory_dir else environment.memory_parent()
    endpoint = meeting(args) if args.membership is None else f"etcd://{meeting(args)}"
    memory = MemoryDirectory(parent, args.rdzv_id, endpoint)
    os.environ[environment.MEMORY_DIR] = str(memory.path)
    return memory


def _pulse_directory(memory: MemoryDirectory | None) -> str:
    """Create the directory in which workers publish their state for this agent."""
    if memory is None:
        return tempfile.mkdtemp(prefix="resilin-pulse-")
    # Several agents may share the memory directory, and a killed one left its own in there.
    return tempfile.mkdtemp(prefix="pulse-", dir=memory.path)


def _leave(memory: MemoryDirectory, run_id: str, *, kept: bool) -> None:
    """Remove the in-memory state if nobody needs it: the job finished, or storage has it."""
    needless = kept or not memory.holds_state
    memory.release(remove=needless)
    if not needless:
        say(f"kept the latest state in {memory.path}: resume with --rdzv-id {run_id}, or remove it")


@contextmanager
def _held(stop: StopSignals) -> Iterator[None]:
    """Deliver signals that stop the job when the block has ended."""
    # Not by a mask: that is of this thread alone, and another one, such as torch's, would take it.
    held: list[int] = []
    for number in stop_signals():
        signal.signal(number, lambda number, _: held.append(number))
    try:
        yield
    finally:
        stop.install()
        if held:
            stop.take(held[0], None)


def _quiet() -> None:
    """Silence torch's log lines in favour of ours, unless LOGLEVEL asks for them."""
    if "LOGLEVEL" in os.environ:
        return
    rooms = (
        "torch.distributed.elastic",
        "torch.distributed.launcher",
        "torch.distributed.run",
        "torch.multiprocessing",
    )
    # torch sets a level on each of its loggers, so there is no single place to change it.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(rooms):
            ends = "multiprocessing" in name  # the agent reports how workers ended
            logging.getLogger(name).setLevel(logging.CRITICAL if ends else logging.ERROR)
