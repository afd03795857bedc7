"""Buddies: which process, on another host, keeps a second copy of what only one process has.

Under FSDP without copies each process has pieces that nobody else has. If its buddy keeps them too,
the hosts that are left after the loss of one have all pieces between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


def buddies(hosts: Mapping[int, int]) -> dict[int, int]:
    """The buddy of each process, always on another host.

    Each process keeps the pieces of one other process. Only if one host has more than half of all
    processes, those of the other hosts keep the pieces of several, as evenly as they can.

    Args:
        hosts: The host of each process.

    Returns:
        The buddy by process; empty if there is only one host.

    Examples:
        >>> buddies({0: 0, 1: 0, 2: 1, 3: 1})
        {0: 2, 1: 3, 2: 0, 3: 1}
    """
    order = sorted(hosts, key=lambda process: (hosts[process], process))
    [(largest, most)] = Counter(hosts.values()).most_common(1) or [(0, 0)]
    if most == len(order):
        return {}
    if 2 * most <= len(order):
        # No host is longer than this step, and what is left of the circle is as long: nobody
        # comes back to its own host.
        return {process: order[(i + most) % len(order)] for i, process in enumerate(order)}
    inside = [process for process in order if hosts[process] == largest]
    outside = [process for process in order if hosts[process] != largest]
    found = {process: outside[i % len(outside)] for i, process in enumerate(inside)}
    found.update(zip(outside, inside, strict=False))
    return found
