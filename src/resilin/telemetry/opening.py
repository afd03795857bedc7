"""Trackers that a sink opens with its first event, by a function of the script.

After a restart, or when another replica takes over in a live job, the new reporter has to continue
the curves of the old one. Who reports is known when there is something to report, so a script may
give a function that opens its writer or its run in place of the object itself.
"""

from __future__ import annotations

from resilin.core.events import Event, FaultEvent, StepEvent


def opens(event: Event) -> bool:
    """Whether this event comes from the process that reports for the job.

    Others report only their own faults. A writer of theirs would hide points of the first one.
    """
    return not isinstance(event, FaultEvent)


def first_step(event: Event) -> int:
    """The first step that is reported from this event on: what is known of later ones is old."""
    return event.step if isinstance(event, StepEvent) else event.step + 1
