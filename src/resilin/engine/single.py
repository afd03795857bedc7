"""A single process: a job of one replica, without a supervisor that would restart it."""

from __future__ import annotations

from resilin.engine.base import Engine


class Single(Engine):
    """The engine of `python script.py`, and of processes that were started by hand."""
