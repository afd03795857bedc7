"""Errors of checkpoints."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or loaded; raised on all replicas, with the reason."""


class CorruptCheckpoint(CheckpointError):
    """A checkpoint is not what was saved; says which file, what was expected and what found."""
