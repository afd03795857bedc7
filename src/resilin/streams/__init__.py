"""Streams: data that can be read in order only, divided into shards.

Nothing here loads torch. `AdaptiveDataLoader` takes anything that has the methods of
`protocol.Stream`; the other modules make such streams of files, of other streams, and of datasets
of other libraries.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resilin.streams.adapt import Indexed, OneShard, as_stream
    from resilin.streams.files import FileStream
    from resilin.streams.huggingface import HuggingFaceStream
    from resilin.streams.mixture import Mixture
    from resilin.streams.packing import Packed
    from resilin.streams.protocol import Stream
    from resilin.streams.shuffled import Shuffled
    from resilin.streams.stateful import StatefulShards
    from resilin.streams.tar import tar_samples

_HOMES = {
    "FileStream": "resilin.streams.files",
    "HuggingFaceStream": "resilin.streams.huggingface",
    "Indexed": "resilin.streams.adapt",
    "Mixture": "resilin.streams.mixture",
    "OneShard": "resilin.streams.adapt",
    "Packed": "resilin.streams.packing",
    "Shuffled": "resilin.streams.shuffled",
    "StatefulShards": "resilin.streams.stateful",
    "Stream": "resilin.streams.protocol",
    "as_stream": "resilin.streams.adapt",
    "tar_samples": "resilin.streams.tar",
}

__all__ = [
    "FileStream",
    "HuggingFaceStream",
    "Indexed",
    "Mixture",
    "OneShard",
    "Packed",
    "Shuffled",
    "StatefulShards",
    "Stream",
    "as_stream",
    "tar_samples",
]


def __getattr__(name: str) -> Any:
    """Loads a public name from its module on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'resilin.streams' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, also those not loaded yet."""
    return sorted([*globals(), *_HOMES])
