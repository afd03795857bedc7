"""Choice of the checkpoints to keep."""

from __future__ import annotations

from collections.abc import Mapping

from resilin.training.state.snapshot import Version


def kept(versions: Mapping[str, Version], *, keep: int, keep_every: int | None) -> set[str]:
    """Chooses the checkpoints to keep; the rest may go.

    Args:
        versions: What each checkpoint holds, by its name.
        keep: How many of the newest stay.
        keep_every: Also the first one at or after each multiple of so many steps stays, for good:
            what a later save adds never takes that place from it.

    Returns:
        Names of those that stay.
    """
    ordered = sorted(versions, key=lambda name: (versions[name], name))
    staying = set(ordered[-keep:])
    if keep_every is not None:
        first: dict[int, str] = {}
        for name in ordered:
            # Steps before the first multiple are nobody's milestone.
            if versions[name].step >= keep_every:
                first.setdefault(versions[name].step // keep_every, name)
        staying.update(first.values())
    return staying
