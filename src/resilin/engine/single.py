"""A process of its own: a job of one replica, with nobody who would start it again."""

from __future__ import annotations

from resilin.engine.base import Engine


class Single(Engine):
    """The engine of `python script.py`, and of processes that were started by hand."""
