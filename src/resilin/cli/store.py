"""`resilin store`: a rendezvous endpoint on a machine that does not train.

The agents of a job find each other through the store at the endpoint, and the job ends with it.
Machines that may be taken away at any time are a bad place for it. This command runs torch's own
store in a process that does nothing else, for a machine that stays up. With `--etcd` it runs the
etcd of the machine instead, which live jobs over several machines need.
"""

from __future__ import annotations

import argparse
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from resilin.cli import etcd_server, values
from resilin.core.text import clean
from resilin.engine.stop import StopRequest

EPILOG = """\
example:
  resilin store --host 10.0.0.5 --port 29500                      # on the machine that stays up
  resilin run --nnodes 1:4 --rdzv-endpoint 10.0.0.5:29500 train.py   # on each of the others

  resilin store --etcd --host 10.0.0.5 --data /var/lib/resilin    # for live jobs
  resilin run --live --membership etcd://10.0.0.5:2379 train.py   # on each of the others

Stop it with SIGTERM or Ctrl-C: the exit code is then 0. It is 1 if the port is not available, or if
there is no etcd.
"""
PORT = 29500
"""Its default port."""


def parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    ours = argparse.ArgumentParser(
        prog="resilin store",
        description="Serves the rendezvous of jobs on a machine that stays up. Give agents its "
        "host name and port as --rdzv-endpoint; jobs with different ids can share it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ours.add_argument(
        "--host",
        default=etcd_server.LOOPBACK,
        help="Address to listen on; 0.0.0.0 for all. Whoever reaches it can run code in the jobs "
        "(default: %(default)s, this machine only).",
    )
    ours.add_argument(
        "--port",
        type=values.port,
        help=f"Port; 0 for any free one (default: {PORT}; {etcd_server.PORT} with --etcd).",
    )
    etcd = ours.add_argument_group(
        "etcd", "The store of live jobs over several machines: --membership of resilin run."
    )
    etcd.add_argument("--etcd", action="store_true", help="Start the etcd that is on the path.")
    etcd.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="Directory of its data (default: a private one that ends with the command).",
    )
    etcd.add_argument("--certificate", metavar="FILE", help="Certificate, for encryption.")
    etcd.add_argument("--key", metavar="FILE", help="Private key of the certificate.")
    etcd.add_argument(
        "--client-ca",
        metavar="FILE",
        help="Certificates that sign those of clients: others are not let in.",
    )
    etcd.add_argument(
        "--unsafe-version",
        action="store_true",
        help="For tests: accept an etcd that may lose data when killed (before 3.4.21 and 3.5.5).",
    )
    return ours


def main(arguments: Sequence[str]) -> int:
    """Serve the store until a signal ends it.

    Returns:
        0 after SIGINT or SIGTERM; 1 if the port is not available, or there is no etcd.
    """
    ours = parser()
    args = ours.parse_args(arguments)
    settings = _settings(ours, args)
    stop = StopRequest()
    stop.listen()
    signal.signal(signal.SIGINT, lambda *_: stop.request("SIGINT"))
    if settings is not None:
        return etcd_server.serve(settings, stop)
    return _serve(args.host, args.port, stop)


def _settings(
    ours: argparse.ArgumentParser, args: argparse.Namespace
) -> etcd_server.Settings | None:
    """The settings of etcd; None without `--etcd`."""
    if not args.etcd:
        for option in ("data", "certificate", "key", "client_ca", "unsafe_version"):
            if getattr(args, option):
                ours.error(f"--{option.replace('_', '-')} must come with --etcd")
        return None
    try:
        return etcd_server.Settings(
            host=args.host,
            port=etcd_server.PORT if args.port is None else args.port,
            data=args.data,
            certificate=args.certificate,
            key=args.key,
            ca=args.client_ca,
            unsafe_version=args.unsafe_version,
        )
    except ValueError as error:
        ours.error(str(error))


def _serve(host: str, given: int | None, stop: StopRequest) -> int:
    port = PORT if given is None else given
    try:
        # torch would listen on all interfaces, whatever the host.
        listening = socket.create_server((host, port))
    except OSError as error:
        print(f"resilin: {clean(f'no store on {host}:{port}: {error}')}")
        return 1
    port = listening.getsockname()[1]
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    print(f"resilin: serving the rendezvous on {host}, port {store.port}", flush=True)
    while not stop.wait(1.0):
        pass
    return 0
