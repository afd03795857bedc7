"""Telemetry: where events go, and how they are read again.

`log` writes the events of a run into a directory, in `segments` whose detail falls with age; `read`
reads them, during the run and after; `run` is what they say, as columns. The other modules are
sinks: each is given an object that the user has, and called with every event. Nothing here holds a
tensor.
"""
