"""`OpenTelemetry`: records events on a meter that the script has.

Only the API is called: readers and exporters, and where they send to, belong to whoever set up the
meter. Numbers are gauges, and rescales, faults, checkpoints and decisions are counters whose
attributes say of which sort.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from resilin.core.events import Event
from resilin.telemetry.scalars import COUNTS, SCALARS, Counts, Meaning, scalars

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter
    from opentelemetry.util.types import AttributeValue

_METRIC = Meaning("1", "A number that the script recorded, by name.")


class OpenTelemetry:
    """A sink that records on a meter. Setting up its provider stays with the script.

    Names begin with `resilin.`. What the user records is in one gauge, `resilin.metric`, with the
    attribute `name`: any name is possible there.

    Args:
        meter: What `get_meter` returned.
        attributes: What every number is to carry, such as the name of the job.

    Raises:
        ValueError: There is no meter, or its API has no gauges yet.
    """

    def __init__(
        self, meter: Meter, attributes: Mapping[str, AttributeValue] | None = None
    ) -> None:
        if not hasattr(meter, "create_gauge"):
            raise ValueError(
                f"meter ({meter!r}) must be a Meter of opentelemetry-api 1.23 or later, "
                "with create_gauge"
            )
        self._attributes = dict(attributes or {})
        self._counts = Counts()
        # An instrument without a number is not exported, so all may be there from the start.
        self._gauges = {
            name: meter.create_gauge(f"resilin.{name}", unit=meaning.unit, description=meaning.text)
            for name, meaning in {**SCALARS, "metric": _METRIC}.items()
        }
        self._counters = {
            name: meter.create_counter(
                f"resilin.{name}", unit=meaning.unit, description=meaning.text
            )
            for name, meaning in COUNTS.items()
        }

    def __call__(self, event: Event) -> None:
        """Records the numbers of the event, and counts it."""
        for name, number in scalars(event).items():
            if name in SCALARS:
                self._gauges[name].set(number, self._attributes)
            else:
                self._gauges["metric"].set(number, {**self._attributes, "name": name})
        count = self._counts(event)
        if count is not None:
            self._counters[count.name].add(count.num, {**self._attributes, **count.labels})
