"""`Prometheus`: keep the latest numbers in a registry, from which Prometheus fetches them.

The script exposes the registry: this module neither opens a port nor pushes. A gauge appears with
its first number, since a zero that nobody measured would be wrong. Counters start at zero in each
process, as Prometheus expects after a restart. A rescale happens at such a start and would be
counted before the first fetch, unseen; so its time is a gauge, and so is that of the last fault.
The dashboard `grafana.json` beside this module shows all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilin.core.events import Event, FaultEvent, RescaleEvent
from resilin.telemetry.extras import load
from resilin.telemetry.scalars import COUNTS, LABELS, SCALARS, Counts, scalars

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Gauge


class Prometheus:
    """A sink that keeps numbers in a registry. The script exposes the registry.

    Metrics of the user are in one gauge, `metric`, with the label `name`, which can be any text;
    one panel shows them all.

    Args:
        registry: The registry to use; the default registry of prometheus_client if None.
        prefix: Prefix of the names. The dashboard expects the default.

    Raises:
        ValueError: The registry already has these metrics, for example from another sink.
        ImportError: prometheus_client is not installed.
    """

    def __init__(self, registry: CollectorRegistry | None = None, prefix: str = "resilin_") -> None:
        self._client = load("prometheus_client", "prometheus", "Prometheus")
        self._registry = self._client.REGISTRY if registry is None else registry
        self._prefix = prefix
        self._gauges: dict[str, Gauge] = {}
        self._counts = Counts()
        self._counters = {
            name: self._client.Counter(
                prefix + name, meaning.text, LABELS.get(name, ()), registry=self._registry
            )
            for name, meaning in COUNTS.items()
        }

    def __call__(self, event: Event) -> None:
        """Store the numbers of the event, and count it."""
        for name, number in scalars(event).items():
            if name in SCALARS:
                self._gauge(name, SCALARS[name].text).set(number)
            else:
                text = "A number that the script recorded, by name."
                self._gauge("metric", text, "name").labels(name).set(number)
        match event:
            case RescaleEvent():
                text = "Time of the last change of the set of replicas."
                self._gauge("last_rescale_timestamp_seconds", text).set(event.time)
            case FaultEvent():
                text = "Time of the last fault of this kind."
                gauge = self._gauge("last_fault_timestamp_seconds", text, "kind")
                gauge.labels(event.kind).set(event.time)
        count = self._counts(event)
        if count is not None:
            counter = self._counters[count.name]
            (counter.labels(**count.labels) if count.labels else counter).inc(count.num)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        if name not in self._gauges:
            self._gauges[name] = self._client.Gauge(
                self._prefix + name, text, labels, registry=self._registry
            )
        return self._gauges[name]
