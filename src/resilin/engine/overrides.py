"""Settings from outside that override the script: a batch-size trace, a rule, a seed, an end.

The trace lab runs one script many times and changes one thing at a time, through environment
variables. They override the settings of the script, and the log reports it.
"""

from __future__ import annotations

import logging
import os
from importlib import import_module
from pathlib import Path
from typing import cast

from resilin.core.rules import ScalingRule, get_rule
from resilin.core.trace import BatchTrace, TraceEnd
from resilin.engine import environment

logger = logging.getLogger("resilin")


def batch_trace() -> BatchTrace | None:
    """The trace to follow, if there is one.

    Raises:
        TraceError: The trace cannot be read; the message names the line.
        OSError: The file cannot be opened.
    """
    path = trace_source()
    if not path:
        return None
    end = cast(TraceEnd, os.environ.get(environment.BATCH_TRACE_END) or "hold")
    return BatchTrace.parse(Path(path).read_text(), source=path, end=end)


def trace_source() -> str:
    """Path of that trace; empty if there is none."""
    return os.environ.get(environment.BATCH_TRACE, "")


def rule() -> ScalingRule | None:
    """The rule that overrides the script's, if there is one.

    Raises:
        ValueError: There is no rule of that name, or nothing to import there.
    """
    name = os.environ.get(environment.RULE)
    if not name:
        return None
    logger.info("%s=%s overrides the rule of the script", environment.RULE, name)
    return import_rule(name) if ":" in name else get_rule(name)


def import_rule(path: str) -> ScalingRule:
    """The rule at `package.module:attribute`: a rule, or a callable that returns one.

    Raises:
        ValueError: The import fails, or the object is not a rule.
    """
    module, _, attribute = path.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"rule {path!r} cannot be imported: {error}") from error
    # A class has the methods of a rule, but is not one.
    is_rule = isinstance(found, ScalingRule) and not isinstance(found, type)
    try:
        return get_rule(found() if callable(found) and not is_rule else found)
    except TypeError as error:
        raise ValueError(f"{path!r}: {error}") from None


def seed() -> int | None:
    """The seed for an order of samples without an explicit seed.

    Raises:
        ValueError: It is not a whole number, 0 or above.
    """
    return _whole(environment.SEED)


def stop_at() -> int | None:
    """Samples on the clock of the job at which the script is to be ended, if there is an end.

    Raises:
        ValueError: It is not a whole number, 0 or above.
    """
    return _whole(environment.STOP_AT)


def _whole(name: str) -> int | None:
    """The whole number in this variable, if it is set."""
    text = os.environ.get(name)
    if not text:
        return None
    if not text.isdecimal():
        raise ValueError(f"{name} ({text!r}) must be a whole number, 0 or above")
    return int(text)


def run_dir() -> Path | None:
    """Directory of the event log set by the launcher; None if it is not set, or `off`."""
    named = os.environ.get(environment.RUN_DIR)
    return Path(named) if named and named != environment.OFF else None


def checkpoint_dir(wanted: str | None) -> str | None:
    """The actual directory for checkpoints that the script asks for.

    Runs of the lab must not resume from each other's states, so each uses its own directory.
    """
    place = run_dir()
    if wanted is None or place is None or os.environ.get(environment.LAB) != "1":
        return wanted
    kept = str(place / "checkpoints")
    logger.info("writing checkpoints to %s, not to %s: this is a run of the lab", kept, wanted)
    return kept
