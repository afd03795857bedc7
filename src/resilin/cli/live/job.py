"""`resilin run --live`: puts the launcher of a live job together, and runs it."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

import torch.distributed.run as torchrun

from resilin.cli.faults import host
from resilin.cli.hang import Watchdog
from resilin.cli.live.guard import Heartbeats
from resilin.cli.live.interface import interface_of
from resilin.cli.live.launcher import Launcher
from resilin.cli.live.session import Session
from resilin.cli.live.signs import Inbox
from resilin.cli.live.verdict import Budget
from resilin.cli.live.workers import Starter
from resilin.cli.options import LOOPBACK, hang_timeout, stop_signals
from resilin.engine import environment
from resilin.engine.authority.keeper import LocalKeeper

INTERFACE = "GLOO_SOCKET_IFNAME"
"""Variable of gloo: the network interface that it listens on."""


class _Common(TypedDict):
    """Arguments of all sessions."""

    num_founders: int
    address: str
    alone: bool
    inbox: Inbox
    on_finished: Callable[[str], None]
    on_over: Callable[[str], None]


def run(args: argparse.Namespace, directory: Path, *, bound_fruitless: bool) -> None:
    """Run this machine's part of a live job until it is over.

    Args:
        args: The options.
        directory: Where workers publish their state.
        bound_fruitless: Whether to give up on a script that keeps failing without a new step.

    Raises:
        GaveUp: The job failed.
        ScriptNotLive: The script cannot be live.
        SignalException: A signal stopped it.
    """
    environment.log_to_stderr()
    num_workers = torchrun.determine_local_world_size(args.nproc_per_node)
    _, entrypoint, arguments = torchrun.config_from_args(args)
    # Those of several launchers must differ, too.
    prefix = args.rdzv_id
    if args.membership is not None:
        # A container that is started again may have the same name and the same process id.
        prefix += f"-{host()}-{secrets.token_hex(4)}"
    starter = Starter(
        prefix,
        num_workers,
        command=[str(entrypoint), *map(str, arguments)],
        script=[args.training_script, *args.training_script_args] if args.warm else None,
        settings=_settings(args),
        processes_per_copy=args.processes_per_copy,
    )
    secret = secrets.token_bytes(32)

    def open_session(launcher: Launcher) -> Session:
        common = _Common(
            num_founders=num_workers // args.processes_per_copy,
            address=args.address or LOOPBACK,
            alone=args.membership is None,
            inbox=inbox,
            on_finished=launcher.finished,
            on_over=launcher.cannot_continue,
        )
        if args.membership is None:
            return Session(LocalKeeper(above=launcher.highest), secret=secret, **common)
        from resilin.cli.live.access import access
        from resilin.cli.live.etcd import EtcdKeeper

        where, above = access(args.membership), launcher.highest
        keeper = EtcdKeeper(where, args.rdzv_id, lease=args.lease, above=above)
        session = Session(keeper, secret=keeper.secret(), **common)
        keeper.on_over = session.over
        return session

    with Inbox(stop_signals()) as inbox:
        Launcher(
            num_workers,
            starter=starter,
            open_session=open_session,
            inbox=inbox,
            watchdog=Watchdog(directory, hang_timeout(args)),
            heartbeats=Heartbeats(args.heartbeat),
            budget=Budget(args.max_restarts, bounds_fruitless=bound_fruitless),
            grace=args.shutdown_timeout,
        ).run()


def _settings(args: argparse.Namespace) -> dict[str, str]:
    """Variables that the workers get, unless the user has set them."""
    # Launchers on several machines have no rendezvous for a job with restarts.
    settings = {environment.LIVE_OR_RESTART: "1"} if args.membership is None else {}
    if INTERFACE in os.environ:
        return settings
    interface: str | None = "lo" if sys.platform == "linux" else "lo0"
    if args.address is not None:
        interface = interface_of(args.address)
    return settings if interface is None else {**settings, INTERFACE: interface}
