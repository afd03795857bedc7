"""`resilin sched serve`: the controller of a cluster, until a signal ends it; jobs run on."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from resilin.cli import values
from resilin.cli.errors import say, user_errors
from resilin.cli.sched import access
from resilin.cluster.backends.base import Backend
from resilin.cluster.controller.api import Api
from resilin.cluster.controller.codec import from_json
from resilin.cluster.controller.journal import Journal
from resilin.cluster.controller.launch import Face
from resilin.cluster.controller.loop import Controller
from resilin.cluster.controller.meeting import Meetings, OutsideStore, StoreProcess
from resilin.cluster.controller.records import Opened
from resilin.cluster.controller.rules import Rules
from resilin.cluster.controller.server import Server
from resilin.cluster.decision import Quota
from resilin.cluster.policies.by_name import POLICIES, by_name

BACKENDS = ("local", "slurm", "ray", "kubernetes")
"""Backends, each the name of a module."""
KILL_AT = "RESILIN_TEST_KILL_AT_LINE"
"""For tests: the number of the line of the journal after which the controller kills itself."""
EPILOG = """\
example:
  resilin sched serve --backend local --option nodes=a=2,b=2
  resilin sched serve --backend slurm --host 0.0.0.0 --port 8470 --address head.example

It prints its URL. The state directory holds its journal, the token (for its owner alone), and the
output of jobs. Stop it with SIGTERM or Ctrl-C: the exit code is then 0, and jobs run on; when it is
started again, it finds them. Without --tls-certificate, the token and all requests can be read on
the network.
"""


def parser() -> argparse.ArgumentParser:
    """The parser of the verb."""
    ours = argparse.ArgumentParser(
        prog="resilin sched serve",
        description="Runs the controller of a cluster.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = ours.add_argument
    add(
        "--backend",
        choices=BACKENDS,
        default="local",
        help="Scheduler that starts the parts of jobs (default: %(default)s).",
    )
    add(
        "--option",
        type=_pair,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="Option of the backend; may be repeated.",
    )
    add(
        "--policy",
        choices=tuple(POLICIES),
        default="ours",
        help="Who gets how many accelerators (default: %(default)s).",
    )
    add(
        "--policy-option",
        type=_pair,
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help="Option of the policy; may be repeated.",
    )
    add("--quota", type=Path, metavar="FILE", help="JSON: guaranteed and limit of each tenant.")
    add(
        "--interval",
        type=values.seconds,
        default=60.0,
        metavar="TIME",
        help="Longest time between two decisions (default: %(default)g s).",
    )
    add(
        "--poll",
        type=values.seconds,
        default=2.0,
        metavar="TIME",
        help="Time between two looks at the backend (default: %(default)g s).",
    )
    add(
        "--grace",
        type=values.seconds,
        default=60.0,
        metavar="TIME",
        help="Time that a part has to save and leave (default: %(default)g s).",
    )
    access.add_state(ours)
    _add_network(ours)
    return ours


def _add_network(ours: argparse.ArgumentParser) -> None:
    add = ours.add_argument
    add("--host", default="127.0.0.1", help="Address to listen on (default: %(default)s).")
    add(
        "--port",
        type=values.port,
        default=0,
        help="Port (default: %(default)s, any free one, and the same at the next start).",
    )
    add(
        "--address",
        metavar="HOST",
        help="Name of this machine for the nodes (default: the address to listen on).",
    )
    add("--tls-certificate", metavar="FILE", help="Certificate, for encryption.")
    add("--tls-key", metavar="FILE", help="Private key of the certificate.")
    add(
        "--tls-ca",
        metavar="FILE",
        help="Certificate that signs it, for jobs: a path on the nodes (default: those that the "
        "system of the nodes knows).",
    )
    add(
        "--rendezvous",
        metavar="HOST:PORT",
        help="A resilin store that jobs meet at (default: one is started on this machine).",
    )


@user_errors
def main(arguments: Sequence[str]) -> int:
    """Serve until a signal ends it.

    Returns:
        0; 1 if another controller uses the state directory, or the backend is not there.
    """
    ours = parser()
    args = ours.parse_args(arguments)
    if (args.tls_certificate is None) != (args.tls_key is None):
        ours.error("--tls-certificate and --tls-key must both be given")
    if args.tls_ca is not None and args.tls_certificate is None:
        ours.error("--tls-ca must come with --tls-certificate")
    directory = (args.state or access.state_directory()).absolute()
    with contextlib.closing(Journal(directory, after_append=_killer())) as journal:
        return _serve(args, directory, journal)


def _serve(args: argparse.Namespace, directory: Path, journal: Journal) -> int:
    if not journal.state.cluster:
        journal.append([Opened(time=time.time(), cluster=f"c{secrets.token_hex(3)}")])
    logs = directory / "logs"
    logs.mkdir(exist_ok=True, mode=0o700)
    rules = Rules(
        interval=args.interval,
        grace=args.grace,
        lead=1.5 * args.grace,
        logs=str(logs),
        quotas=_quotas(args.quota),
    )
    options = {name: _number(text) for name, text in args.policy_option}
    policy = by_name(args.policy, **{"lead": rules.lead, **options})
    backend = _backend(args, directory, journal.state.cluster)
    meetings, token = _meetings(args, directory), access.ensure_token(directory)
    certificate = (args.tls_certificate, args.tls_key) if args.tls_certificate else None
    with Server((args.host, _port(args, directory)), certificate) as server:
        url = _url(args, server.server_address[1])
        face = Face(url=url, token=token, ca=args.tls_ca or "")
        controller = Controller(
            journal, backend, meetings, policy, rules, face, poll=args.poll, tell=say
        )
        server.api = Api(controller)
        _write_address(directory, url, server.server_address[1])
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: controller.stop())
        threading.Thread(target=server.serve_forever, name="resilin-http", daemon=True).start()
        print(f"resilin: serving cluster {journal.state.cluster} at {url}", flush=True)
        controller.run()
        server.shutdown()
    return 0


def _backend(args: argparse.Namespace, directory: Path, cluster: str) -> Backend:
    options = dict(args.option)
    if args.backend == "local":
        options.setdefault("directory", str(directory / "local"))
    module = import_module(f"resilin.cluster.backends.{args.backend}")
    backend: Backend = module.backend(cluster, options)
    reason = backend.detect()
    if reason is not None:
        raise ValueError(f"--backend {args.backend} cannot be used here: {reason}")
    return backend


def _meetings(args: argparse.Namespace, directory: Path) -> Meetings:
    if args.rendezvous is not None:
        return OutsideStore(args.rendezvous)
    return StoreProcess(directory / "meeting", _address(args), args.host)


def _address(args: argparse.Namespace) -> str:
    if args.address is not None:
        return str(args.address)
    return socket.getfqdn() if args.host in ("0.0.0.0", "::", "") else str(args.host)


def _url(args: argparse.Namespace, port: int) -> str:
    host = _address(args)
    scheme = "https" if args.tls_certificate else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _port(args: argparse.Namespace, directory: Path) -> int:
    """The port: jobs that run know the last one."""
    if args.port:
        return int(args.port)
    try:
        last = int(json.loads((directory / access.ADDRESS).read_text())["port"])
        with socket.create_server((args.host, last)):
            return last
    except (OSError, ValueError, KeyError, TypeError):
        return 0  # the first start, or somebody else has it


def _write_address(directory: Path, url: str, port: int) -> None:
    temporary = directory / f"{access.ADDRESS}.{os.getpid()}"
    temporary.write_text(json.dumps({"url": url, "port": port, "pid": os.getpid()}))
    temporary.rename(directory / access.ADDRESS)


def _quotas(path: Path | None) -> dict[str, Quota]:
    if path is None:
        return {}
    told = json.loads(path.read_text())
    if not isinstance(told, dict):
        raise ValueError(f"{path} must be an object of tenants")
    found = {}
    for tenant, quota in told.items():
        unknown = sorted(set(quota) - {"guaranteed", "limit"}) if isinstance(quota, dict) else []
        if unknown:
            raise ValueError(f"{path}: {tenant} has {unknown[0]!r}: known are guaranteed, limit")
        found[tenant] = from_json(Quota, quota)
    return found


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _number(text: str) -> Any:
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"an option of the policy ({text!r}) must be a number") from None
    return int(number) if text.isdigit() else number


def _killer() -> Any:
    """Kills this process after a line of the journal, where a test says so."""
    at = os.environ.get(KILL_AT)
    if at is None:
        return None

    def kill(written: int) -> None:
        if written >= int(at):
            os.kill(os.getpid(), signal.SIGKILL)

    return kill
