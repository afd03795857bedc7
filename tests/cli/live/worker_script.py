"""A worker that takes part in a live job, and trains nothing.

It speaks to its launcher as the engine does, and reports generations as formed. A test appends what
it is to do: `step()` is one turn, with a new count of steps in its published state.
"""

import json
import os
import pathlib
import sys
import time

from resilin.core.hang import Phase
from resilin.core.live import Form, Join, Leave
from resilin.core.membership import Member
from resilin.core.recovery import Version
from resilin.engine import pulse
from resilin.engine.live.client import Client

out, env = pathlib.Path(sys.argv[1]), os.environ
name, slot = env["RESILIN_MEMBER"], env["LOCAL_RANK"]
number = int(name.rpartition("-")[2])
stopped = False


def tell(what, **more):
    """Writes a file that a test waits for; renamed, so that it finds all of it."""
    hidden = out / f".{what}-{os.getpid()}"
    hidden.write_text(json.dumps({**env, **more, "argv": sys.argv[2:]}))
    hidden.rename(out / f"{what}-{os.getpid()}")


def asked(what):
    """Whether the test has asked for this by making a file."""
    return (out / what).exists()


def connect():
    """Connects and publishes its state, as `resilin.init_process_group()` does."""
    global client, shown, steps
    client = Client(env["RESILIN_LIVE"], name)
    client.on_stop = stop
    pulse.announce()
    shown, steps = pulse.of_this_process(), 0


def join():
    """Joins, and waits until its generation is formed."""
    global steps
    client.tell(Join(Member(name=name, address="127.0.0.1:1")))
    while not is_member():
        turn()
    steps = client.newest.state.step
    shown.start(steps)
    tell("joined")


def is_member():
    newest = client.newest
    return newest is not None and newest.formed is not None and name in newest.formed.names


def turn():
    """Reports the newest generation as formed, if that is ours to do."""
    newest = client.newest
    if newest is not None and newest.formed != newest.roster and newest.roster.names[0] == name:
        roster = newest.roster
        state = Version(roster.generation, steps)
        client.ask(Form(roster.generation, roster.names, state), 30)
    time.sleep(0.01)


def step():
    global steps
    turn()
    steps += 1
    shown.begin_step()
    shown.beat(Phase.AFTER, steps)


def members():
    return len(client.newest.formed.names)


def stop():
    global stopped
    stopped = True


def train(until):
    """Makes steps until the test asks for the end, or the job is stopped."""
    while not until() and not stopped:
        step()


def leave(number, frame):
    """Leaves when all have seen it, as the engine does on SIGTERM."""
    client.ask(Leave(name), 30)
    while name in client.newest and not stopped:
        turn()
    os._exit(128 + number)
