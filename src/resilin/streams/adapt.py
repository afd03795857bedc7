"""`as_stream`: the stream behind what a user hands to a loader."""

from __future__ import annotations

from typing import Any

from resilin.streams.protocol import Stream, is_stream


def as_stream(data: Any) -> Stream | None:
    """The stream in some data; None if they have an index.

    Raises:
        ValueError: They have neither an index nor shards.
    """
    if is_stream(data):
        return data
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return None
    raise ValueError(
        f"{type(data).__qualname__} has neither an index (__len__ and __getitem__) nor shards "
        "(num_shards and open())"
    )
