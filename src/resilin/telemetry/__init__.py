"""Telemetry: writing, reading and forwarding events.

`log` writes the events of a run to a directory, in `segments` that lose detail with age; `read`
reads them, during the run and afterwards; `run` turns them into columns. The other modules are
sinks: each wraps an object of the user and is called with every event. Nothing here holds a
tensor.
"""
