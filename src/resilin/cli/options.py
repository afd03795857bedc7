"""Options of `resilin run`: torchrun's own parser, with other defaults and a few more options.

So every option of the installed torch works. An environment variable of torchrun (such as
`PET_NNODES`) overrides a default of resilin.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import uuid
from collections.abc import Callable

import torch
import torch.distributed.run as torchrun

from resilin.compat.python_names import list_first
from resilin.core.hang import PATIENCE
from resilin.engine import environment
from resilin.engine.environment import parse_every

RENDEZVOUS = {"last_call_timeout": 2, "keep_alive_interval": 1, "keep_alive_max_attempt": 5}
"""Rendezvous settings: seconds to wait for more machines, seconds between keep-alives, and missed
keep-alives after which a machine counts as gone. Measured: the table in docs/guides/cli.md."""
STOP_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
)
"""Signals that are passed to the workers and then stop the job; SIGUSR1 is the notice of Slurm."""
HANG_TIMEOUT = 600
"""Default limit for a step without progress, in seconds; torch's own limit for a collective is
three times that."""
SHUTDOWN_TIMEOUT = 30
"""Seconds that workers have to save their state before they are killed."""
HEARTBEAT = 5.0
"""Default time without a sign of life after which a worker of a live job is killed, in seconds. A
worker sends one every 0.25 s, from a thread that may wait while native code holds Python's lock."""
LEASE = 3.0
"""Seconds after which the workers of a launcher that is lost are removed from a live job."""
SHORTEST_LEASE = 2.0
"""Shortest lease that etcd grants, in seconds."""
LOOPBACK = "127.0.0.1"
"""Default address on which workers of a live job listen."""
LAST_PORT = 65535
"""The highest port there is."""
LIVE_OPTIONS = ("heartbeat", "membership", "lease", "address", "processes_per_copy")
"""Options that only live jobs have."""
RENDEZVOUS_OPTIONS = ("nnodes", "rdzv_endpoint", "rdzv_conf", "node_rank", "local_addr")
"""Options of torchrun that live jobs do not have."""


def parser() -> argparse.ArgumentParser:
    """The parser of torchrun, with our defaults and options."""
    ours: argparse.ArgumentParser = torchrun.get_args_parser()
    ours.prog = "resilin run"
    ours.usage = "resilin run [options] [-m] script [arguments of the script]"
    ours.description = (
        "Starts the workers of an elastic job on this machine, and restarts them when a worker "
        "fails or hangs, or when a machine joins or leaves. Takes every option of torchrun."
    )
    ours.epilog = (
        "example:\n"
        "  resilin run --nproc 2 train.py --lr 0.1\n"
        "  resilin run --nnodes 1:4 --rdzv-endpoint gpu-1:29500 --checkpoint-dir s3://bucket/job "
        "train.py"
    )
    ours.formatter_class = argparse.RawDescriptionHelpFormatter
    group = ours.add_argument_group("resilin")
    group.add_argument(
        "--nproc",
        dest="nproc_per_node",
        metavar="N|gpu|cpu|auto",
        default=argparse.SUPPRESS,
        help="Number of workers on this machine. Default: one for each accelerator, or 1.",
    )
    group.add_argument(
        "--warm",
        action="store_true",
        help="Fork workers from a process that has already imported torch, so that they restart in "
        "a fraction of the time.",
    )
    group.add_argument(
        "--checkpoint-dir",
        metavar="URL",
        help="Directory for checkpoints, unless the script sets one: a path or an fsspec URL.",
    )
    group.add_argument(
        "--checkpoint-every",
        metavar="INTERVAL",
        help="Interval between checkpoints, unless the script sets one: 500steps, 90s, 10min, 1h.",
    )
    group.add_argument(
        "--memory-dir",
        metavar="DIR|off",
        help="Directory for in-memory copies of the latest state; each job creates its own "
        "subdirectory. Default: in /dev/shm.",
    )
    group.add_argument(
        "--run-dir",
        metavar="DIR|off",
        help="Directory for the event log of the run, which resilin top and resilin report read. "
        "Default: resilin-runs/ID, with the id of the job.",
    )
    group.add_argument(
        "--hang-timeout",
        metavar="SECONDS|off",
        help="Longest time without progress within a step, in seconds. After that the worker that "
        "blocks the others is reported and all workers are restarted. Outside of steps the limit "
        f"is {PATIENCE:g} times as long; it also grows with the duration of steps. Default: "
        f"${environment.HANG_TIMEOUT}, or {HANG_TIMEOUT}.",
    )
    group.add_argument(
        "--left-code",
        type=int,
        default=0,
        metavar="CODE",
        help="Exit code if the script ended well and left the loop over epochs before its end, for "
        "a scheduler that is to start it again (default: %(default)s).",
    )
    _add_live(group.add_argument)
    list_first(ours, "resilin", others="torchrun")
    defaults = {
        "nproc_per_node": "auto" if torch.accelerator.is_available() else "1",
        "nnodes": None,
        "rdzv_backend": "c10d",
        "rdzv_id": None,
        "max_restarts": None,
        "shutdown_timeout": SHUTDOWN_TIMEOUT,
        "signals_to_handle": ",".join(number.name for number in stop_signals()),
    }
    # Variables in torchrun's environment were set by the user. Unknown ones are never read.
    asked = {name for name in defaults if f"PET_{name.upper()}" in os.environ}
    ours.set_defaults(**{name: defaults[name] for name in defaults.keys() - asked})
    return ours


def _add_live(add: Callable[..., argparse.Action]) -> None:
    """Add the options of jobs whose workers keep running when others come and go."""
    add(
        "--live",
        action="store_true",
        help="Workers keep running when others are lost or join: only the lost ones are replaced.",
    )
    add(
        "--heartbeat",
        metavar="SECONDS",
        help="With --live: time without a sign of life after which a worker counts as frozen, and "
        f"is killed and replaced. Default: {HEARTBEAT:g}.",
    )
    add(
        "--membership",
        metavar="URL",
        help="With --live: where the machines of a job agree on its members, such as "
        "etcd://host:2379. Default: this machine alone.",
    )
    add(
        "--lease",
        metavar="SECONDS",
        help="With --membership: time without a sign of a launcher after which its workers are "
        f"removed from the job. Default: {LEASE:g}.",
    )
    add(
        "--address",
        metavar="ADDRESS",
        help="With --live: address of this machine on which its workers listen. Default: "
        f"{LOOPBACK}, which other machines cannot reach.",
    )
    add(
        "--processes-per-copy",
        metavar="N",
        help="With --live: workers over which each copy of a model is sharded, under HSDP. They "
        "are lost and replaced together. Default: 1.",
    )


def complete(args: argparse.Namespace) -> None:
    """Fill in the options that depend on others.

    Raises:
        ValueError: Options contradict each other, or one is missing.
    """
    if args.checkpoint_every:
        try:
            parse_every(args.checkpoint_every)
        except ValueError as error:
            raise ValueError(f"--checkpoint-every: {error}") from None
    hang_timeout(args)
    _check_numbers(args)
    if args.warm and (args.module or args.no_python or args.run_path):
        raise ValueError(
            "--warm needs a Python script: it cannot be combined with --module, --no-python or "
            "--run-path"
        )
    if args.standalone and args.rdzv_endpoint:
        raise ValueError(
            f"--standalone is a job on this machine alone: it cannot be combined with "
            f"--rdzv-endpoint ({args.rdzv_endpoint})"
        )
    if args.live:
        _complete_live(args)
    elif given := [name for name in LIVE_OPTIONS if getattr(args, name) is not None]:
        option = given[0].replace("_", "-")
        raise ValueError(f"--{option} belongs to live jobs: it needs --live")
    args.standalone = False  # a job without an endpoint is standalone, except for the id
    if args.rdzv_backend == "c10d":
        if args.rdzv_endpoint:
            if args.nnodes is None:
                raise ValueError(
                    f"--rdzv-endpoint ({args.rdzv_endpoint}) needs --nnodes, the number of "
                    "machines that may take part, such as 1:4"
                )
            # The same on all machines, and different for another job.
            args.rdzv_id = args.rdzv_id or re.sub(r"[^\w.-]", "-", args.rdzv_endpoint)
        else:
            args.nnodes = args.nnodes or "1:1"
            if torchrun.parse_min_max_nnodes(args.nnodes)[1] > 1:
                raise ValueError(
                    f"--nnodes {args.nnodes} needs --rdzv-endpoint HOST:PORT, where the machines "
                    "find each other: the name of one of them, and a free port on it"
                )
            args.rdzv_endpoint = "localhost:0"
        defaults = ",".join(f"{key}={value}" for key, value in RENDEZVOUS.items())
        args.rdzv_conf = f"{defaults},{args.rdzv_conf}".rstrip(",")
    args.nnodes = args.nnodes or "1:1"
    args.rdzv_id = args.rdzv_id or uuid.uuid4().hex[:12]


def _check_numbers(args: argparse.Namespace) -> None:
    """Check the number of workers and the port: torch would fail late, or wait for nobody."""
    try:
        workers = torchrun.determine_local_world_size(args.nproc_per_node)
    except ValueError as error:
        raise ValueError(f"--nproc ({args.nproc_per_node}): {error}") from None
    if workers < 1:
        raise ValueError(f"--nproc ({args.nproc_per_node}) must be at least 1")
    if args.rdzv_backend == "c10d" and args.rdzv_endpoint:
        host, _, port = args.rdzv_endpoint.rpartition(":")
        if host and not (port.isdecimal() and int(port) <= LAST_PORT):
            raise ValueError(
                f"--rdzv-endpoint ({args.rdzv_endpoint}) must end with a port from 0 to {LAST_PORT}"
            )


def _complete_live(args: argparse.Namespace) -> None:
    """Fill in the options of a live job, which has no rendezvous."""
    for name in RENDEZVOUS_OPTIONS:
        if value := getattr(args, name):
            raise ValueError(
                f"--live has no rendezvous: it cannot be combined with "
                f"--{name.replace('_', '-')} ({value}); several machines need --membership"
            )
    if args.rdzv_backend != "c10d":
        raise ValueError(
            f"--live has no rendezvous: it cannot be combined with --rdzv-backend "
            f"({args.rdzv_backend}); several machines need --membership"
        )
    if args.run_path:
        raise ValueError("--live cannot be combined with --run-path")
    if args.redirects != "0" or args.tee != "0" or args.log_dir is not None:
        raise ValueError(
            "--live leaves the output of workers alone: it cannot be combined with --redirects, "
            "--tee or --log-dir"
        )
    args.heartbeat = _seconds("--heartbeat", args.heartbeat, HEARTBEAT)
    args.processes_per_copy = _processes_per_copy(args)
    if args.membership is None:
        if args.lease is not None:
            raise ValueError(
                f"--lease ({args.lease}) is about other machines: it needs --membership"
            )
        return
    args.lease = _seconds("--lease", args.lease, LEASE)
    if args.lease < SHORTEST_LEASE:
        raise ValueError(
            f"--lease ({args.lease:g}) must be at least {SHORTEST_LEASE:g} seconds, the shortest "
            "lease that etcd grants"
        )
    if not re.fullmatch(r"etcd(s)?://.+", args.membership):
        raise ValueError(f"--membership ({args.membership}) must be a URL etcd://HOST:PORT")
    # The same on all machines, and different for another job.
    args.rdzv_id = args.rdzv_id or re.sub(r"[^\w.-]", "-", meeting(args))


def _processes_per_copy(args: argparse.Namespace) -> int:
    text = "1" if args.processes_per_copy is None else args.processes_per_copy
    if not text.isdigit() or text == "0":
        raise ValueError(f"--processes-per-copy ({text}) must be a whole number above 0")
    size, workers = int(text), torchrun.determine_local_world_size(args.nproc_per_node)
    if workers % size:
        raise ValueError(
            f"--processes-per-copy ({size}) must divide the number of workers, --nproc-per-node "
            f"({workers})"
        )
    if size > 1 and args.membership is not None:
        raise ValueError(
            f"--processes-per-copy ({size}) cannot be combined with --membership "
            f"({args.membership}): copies of a sharded model are replaced on one machine only"
        )
    return size


def meeting(args: argparse.Namespace) -> str:
    """The meeting place of the job's machines, as `host:port`; port 0 if there is one machine."""
    if args.membership is None:
        return str(args.rdzv_endpoint)
    place: str = args.membership.partition("://")[2].rpartition("@")[2]
    return place.partition("/")[0].partition(",")[0]


def hang_timeout(args: argparse.Namespace) -> float:
    """Seconds without progress in a step after which a job counts as hung; may be infinite.

    Raises:
        ValueError: The setting is not a number of seconds.
    """
    if args.hang_timeout is not None:
        return _hang_timeout("--hang-timeout", args.hang_timeout)
    return _hang_timeout(
        environment.HANG_TIMEOUT, os.environ.get(environment.HANG_TIMEOUT, str(HANG_TIMEOUT))
    )


def _hang_timeout(name: str, text: str) -> float:
    try:
        return environment.parse_hang_timeout(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _seconds(name: str, text: str | None, default: float) -> float:
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"{name} ({text}) must be a number of seconds above 0")
    return seconds


def stop_signals() -> list[signal.Signals]:
    """Signals that stop the job, except those that this process ignores, as under nohup."""
    return [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
