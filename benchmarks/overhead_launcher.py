"""The launcher of a live job of `overhead.py`: it says who is in the job, and starts nobody.

It is a process of its own, as it is under `resilin run --live`, so that a step is charged with what
its worker does. It ends when its standard input does.
"""

from __future__ import annotations

import argparse
import secrets
import sys

from resilin.engine.authority.keeper import LocalKeeper
from resilin.engine.authority.server import Server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", help="path of the socket")
    parser.add_argument("num_workers", type=int, help="number of workers")
    parser.add_argument("ancestor", type=int, help="process that has started all of them")
    args = parser.parse_args()
    server = Server(
        args.path,
        LocalKeeper(),
        num_founders=args.num_workers,
        secret=secrets.token_bytes(32),
        address="127.0.0.1",
        on_alive=lambda name: None,
        on_finished=lambda name: None,
        on_restart=lambda name, reason: print(f"{name}: {reason}", file=sys.stderr),
    )
    for rank in range(args.num_workers):
        server.expect(f"worker-{rank}", args.ancestor)
    sys.stdin.buffer.read()
    server.close()


if __name__ == "__main__":
    main()
