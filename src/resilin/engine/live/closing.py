"""Closing the groups of generations that are over, off the path of the training."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable

import torch.distributed as dist

from resilin.engine.live.inherited import Listeners

LAST = 1.0
"""Seconds between two looks whether anybody else has a reference to a group that is over."""
_OURS = 2
"""References to a group of the list below: that of the list, and that of the call which counts."""


def close(groups: Iterable[dist.ProcessGroup], listeners: Listeners | None = None) -> None:
    """Closes the groups of a generation that is over, in a thread.

    Of a group that broke, a collective may be left that ends with its connections or its time limit
    alone, as that with a peer which is cut off, and with it the group: nobody may wait for that.
    Whoever gives up the last reference to a group waits. That may be the garbage collector, in any
    thread: a lost step leaves an error behind, with the frames that had the group. So the last one
    is kept here.

    Args:
        groups: The groups; whoever calls this gives up its own references to them.
        listeners: Addresses of their members, whose connections are ended.
    """
    if kept := list(groups):
        args = (kept, listeners)
        threading.Thread(target=_close, args=args, name="resilin-closing", daemon=True).start()


def _close(kept: list[dist.ProcessGroup], listeners: Listeners | None) -> None:
    # As long as one is open, forked children have to know whose connections theirs are.
    while kept:
        time.sleep(LAST)
        if listeners is not None:
            listeners.hang_up()
        # One without the others: to close one may take as long as its collective.
        free = [i for i in range(len(kept)) if sys.getrefcount(kept[i]) <= _OURS]
        for i in reversed(free):
            del kept[i]
