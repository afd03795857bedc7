"""`resilin store`: a meeting point that is not one of the machines that train.

The store at the endpoint is where the agents of a job find each other; the job ends with it. Among
machines that may go at any time, none is a good place for it. This command is torch's own store in
a process that does nothing else, for a machine that stays.
"""

from __future__ import annotations

import argparse
import signal
import socket
from collections.abc import Sequence

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from resilin.core.text import clean
from resilin.engine.stop import StopRequest

EPILOG = """\
example:
  resilin store --port 29500                                    # on the machine that stays
  resilin run --nnodes 1:4 --rdzv-endpoint stays:29500 train.py   # on each of the others

It ends with SIGTERM or Ctrl-C, and returns 0 then; 1 if the port cannot be had.
"""


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    ours = argparse.ArgumentParser(
        prog="resilin store",
        description="Holds the meeting point of jobs on a machine that stays. Give agents its "
        "name and port as --rdzv-endpoint; jobs with different ids share it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ours.add_argument(
        "--host", default="0.0.0.0", help="Address to listen on (default: %(default)s, all)."
    )
    ours.add_argument(
        "--port", type=int, default=29500, help="0 for any free one (default: %(default)s)."
    )
    return ours


def main(arguments: Sequence[str]) -> int:
    """Holds the store until a signal ends it.

    Returns:
        0 after SIGINT or SIGTERM; 1 if the port cannot be had.
    """
    args = parser().parse_args(arguments)
    stop = StopRequest()
    stop.listen()
    signal.signal(signal.SIGINT, lambda *_: stop.request("SIGINT"))
    try:
        # torch would listen on all interfaces, whatever the host.
        listening = socket.create_server((args.host, args.port))
    except OSError as error:
        print(f"resilin: {clean(f'no store on {args.host}:{args.port}: {error}')}")
        return 1
    port = listening.getsockname()[1]
    store = TCPStore(
        args.host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    print(f"resilin: agents can meet at port {store.port}", flush=True)
    while not stop.wait(1.0):
        pass
    return 0
