"""`OpenTelemetry`: record events on a meter of the script.

Only the API is called: readers, exporters and their targets are configured where the meter is
created. Numbers are gauges; rescales, faults, checkpoints and decisions are counters with their
kind as an attribute.
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
    """A sink that records on a meter. The script sets up the provider.

    Names begin with `resilin.`. Metrics of the user are in one gauge, `resilin.metric`, with the
    attribute `name`, which can be any text.

    Args:
        meter: The return value of `get_meter`.
        attributes: Attributes of every number, such as the name of the job.

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
        # An instrument without a number is not exported, so all can be created at the start.
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
        """Record the numbers of the event, and count it."""
        for name, number in scalars(event).items():
            if name in SCALARS:
                self._gauges[name].set(number, self._attributes)
            else:
                self._gauges["metric"].set(number, {**self._attributes, "name": name})
        count = self._counts(event)
        if count is not None:
            self._counters[count.name].add(count.num, {**self._attributes, **count.labels})
