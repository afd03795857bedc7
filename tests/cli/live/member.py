"""A member in a process of its own, which does what it is told on its standard input."""

from __future__ import annotations

import json
import os
import sys
import time

from resilin.core.live import Authority, Form, Join, Leave, Renew
from resilin.core.membership import Member
from resilin.core.recovery import Version
from resilin.engine.live.client import Client

LONG = 60.0


def shown(authority: Authority | None) -> object:
    if authority is None:
        return None
    return [authority.roster.generation, list(authority.roster.names), authority.revision]


def do(client: Client, command: list[str]) -> object:
    """One command, and what it says."""
    match command:
        case ["join"]:
            client.tell(Join(Member(name=client.name)))
            return None
        case ["ask"]:
            return shown(client.ask(Join(Member(name=client.name)), LONG))
        case ["renew", generation]:
            return shown(client.ask(Renew(int(generation)), LONG))
        case ["leave"]:
            return shown(client.ask(Leave(client.name), LONG))
        case ["form"]:
            assert client.newest is not None
            roster = client.newest.roster
            return shown(client.ask(Form(roster.generation, roster.names, Version(0, 0)), LONG))
        case ["wait", generation]:
            return shown(client.wait(lambda new: new.roster.generation >= int(generation), LONG))
        case ["revision", number]:
            return shown(client.wait(lambda new: new.revision >= int(number), LONG))
        case ["newest"]:
            return shown(client.newest)
        case ["finish"]:
            client.finished()
            client.close()
            return None
        case ["lost"]:
            deadline = time.monotonic() + LONG
            while not client.lost and time.monotonic() < deadline:
                time.sleep(0.01)
            return client.lost
        case ["fork"]:
            # A child has no part in the connection, and does not end it.
            if (child := os.fork()) == 0:
                client.tell(Leave(client.name))
                client.close()
                os._exit(0 if client.lost and client.wait(lambda new: True, 0) is not None else 1)
            return os.waitpid(child, 0)[1]
        case _:
            raise ValueError(command)


def main() -> None:
    """Connects, says so, and does what each line says."""
    path, name = sys.argv[1:]
    try:
        client = Client(path, name)
    except ConnectionError as error:
        print(json.dumps(str(error)), flush=True)
        return
    print(json.dumps([client.name, client.address, client.secret.hex()]), flush=True)
    for line in sys.stdin:
        print(json.dumps(do(client, line.split())), flush=True)


if __name__ == "__main__":
    main()
