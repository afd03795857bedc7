"""How a replica tells that it has lost another one: in a line.

When a process dies, gloo fails in all that were connected to it, each with a traceback through the
backward pass of a step that has no fault. The cause is elsewhere, and under `resilin run` the agent
names it. So there the others say one line; an error of any other kind keeps its traceback.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from types import TracebackType

from resilin.engine import environment

logger = logging.getLogger("resilin")

_GLOO = re.compile(r"gloo/transport/\S+\] (.*?(?:reset by peer|closed by peer|Broken pipe))")


def lost_connection(error: BaseException) -> str | None:
    """What gloo says of a connection whose other end is gone; None if this is another error.

    One that was raised while another one was being handled is not taken for it: the first of the
    two may be the cause.
    """
    if not isinstance(error, RuntimeError) or error.__cause__ or error.__context__:
        return None
    found = _GLOO.search(str(error))
    return None if found is None else found.group(1)


def tell_briefly(replica: int) -> None:
    """Makes this process end with one line, not a traceback, when another one was lost.

    Only where the launcher has asked for a log, and not for all of it: `RESILIN_LOG=DEBUG` keeps
    tracebacks. Call it behind the initialisation of the process group, whose own hook would come
    before this one; twice does no harm.
    """
    if os.environ.get(environment.LOG, "DEBUG").upper() == "DEBUG":
        return
    usual = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        said = lost_connection(error)
        if said is None:
            usual(kind, error, traceback)
        else:
            logger.warning("replica %d has lost another one (%s)", replica, said)

    sys.excepthook = hook
