"""The loss of a peer: the error of those that outlive it, and one line in place of a traceback.

When a process dies, gloo fails in every process that was connected to it, each with a traceback
through a backward pass that is not at fault. The cause is elsewhere. Under `resilin run` the agent
reports it, and the survivors say nothing; under another launcher each of them logs one line. Any
other error keeps its traceback.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable
from types import TracebackType

from resilin.engine import environment

logger = logging.getLogger("resilin")

_GLOO = re.compile(r"gloo/transport/\S+\] (.*?(?:reset by peer|closed by peer|Broken pipe))")


class PeerLost(RuntimeError):
    """A collective cannot end: a member of its generation is gone, or gave the generation up.

    It never reaches the code of a script: the step fails and is issued again, by those that stay.
    """


def lost_connection(error: BaseException) -> str | None:
    """The message of gloo about a connection whose other end is gone; None for any other error.

    An error raised while another one was being handled does not count: the first of the two may be
    the cause.
    """
    if not isinstance(error, RuntimeError) or error.__cause__ or error.__context__:
        return None
    found = _GLOO.search(str(error))
    return None if found is None else found.group(1)


def shorten_traceback(
    replica: int, tell: Callable[[BaseException], bool] = lambda error: False
) -> None:
    """Make this process end without a traceback when it loses a peer.

    It logs one line, unless its agent reports the cause. Only if the launcher has set a log level
    other than DEBUG: `RESILIN_LOG=DEBUG` keeps tracebacks. Call it after the initialisation of the
    process group, which installs a hook of its own; calling it twice does no harm.

    Args:
        replica: Number of this replica.
        tell: Records the error for the agent, and returns whether there is one that reports it.
    """
    if os.environ.get(environment.LOG, "DEBUG").upper() == "DEBUG":
        return
    usual = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        message = lost_connection(error)
        if message is None:
            usual(kind, error, traceback)
        elif not tell(error):
            logger.warning("replica %d lost its connection to a peer (%s)", replica, message)

    sys.excepthook = hook
