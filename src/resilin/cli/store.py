"""`resilin store`: a rendezvous endpoint on a machine that does not train.

The agents of a job find each other through the store at the endpoint, and the job ends with it.
Machines that may be taken away at any time are a bad place for it. This command runs torch's own
store in a process that does nothing else, for a machine that stays up.
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
  resilin store --port 29500                                      # on the machine that stays up
  resilin run --nnodes 1:4 --rdzv-endpoint stays:29500 train.py   # on each of the others

Stop it with SIGTERM or Ctrl-C: the exit code is then 0. It is 1 if the port is not available.
"""


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
        "--host", default="0.0.0.0", help="Address to listen on (default: %(default)s, all)."
    )
    ours.add_argument(
        "--port", type=int, default=29500, help="Port; 0 for any free one (default: %(default)s)."
    )
    return ours


def main(arguments: Sequence[str]) -> int:
    """Serve the store until a signal ends it.

    Returns:
        0 after SIGINT or SIGTERM; 1 if the port is not available.
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
    print(f"resilin: serving the rendezvous on port {store.port}", flush=True)
    while not stop.wait(1.0):
        pass
    return 0
