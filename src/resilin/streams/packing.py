"""`Packed`: documents of tokens, packed to a fixed length without losing or repeating a token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from resilin.core import _validate
from resilin.streams.cursor import Cursor, check_shard, digest, fingerprint_of, open_cursor
from resilin.streams.protocol import Json, Stream

Remainder = Literal["pad", "short", "drop"]
"""Treatment of the last tokens of a shard, which are too few for a pack.

`pad`: they are a pack that is filled up. `short`: they are a shorter pack. `drop`: they are left
out, up to `length - 1` tokens of each shard in each epoch.
"""


class Packed:
    """Packs of `length` tokens: documents one after the other, cut wherever a pack is full.

    A sample is a dict of `input_ids`, an array of int64, and `num_tokens`, how many of them are
    tokens of documents or separators: weigh the loss by it, as it is smaller in a pack that was
    filled up.

    The state refers to the document in which the next pack begins: the place of the source before
    that document, and the number of its tokens that were used. A resumed shard reads it again.
    """

    def __init__(
        self,
        stream: Stream,
        length: int,
        *,
        tokens: Callable[[Any], Any] | None = None,
        separator: int | None = None,
        remainder: Remainder = "pad",
        pad: int = 0,
    ) -> None:
        """Makes a stream; reads nothing.

        Args:
            stream: The documents.
            length: Number of tokens in a pack.
            tokens: Returns the tokens of a document, a list or an array of whole numbers; always
                the same ones for the same document. None takes the document itself, or its
                `input_ids` if it is a dict.
            separator: A token to add after each document.
            remainder: Treatment of the last tokens of a shard. Packs of `short` are not all of one
                length, so torch's default `collate_fn` cannot stack them.
            pad: Token to fill up with, where `remainder` is `pad`.

        Raises:
            ValueError: An argument is out of its range.
        """
        self._stream = stream
        self._length = _validate.whole("length", length, at_least=1)
        self._tokens = tokens
        self._separator = separator
        _validate.one_of("remainder", remainder, ("pad", "short", "drop"))
        self._remainder: Remainder = remainder
        self._pad = pad
        self.num_shards = stream.num_shards
        self.fingerprint = digest(
            *("packed", fingerprint_of(stream), self._length, separator, remainder),
            pad if remainder == "pad" else None,
        )

    def open(self, shard: int, num_shards: int, epoch: int) -> Iterator[Any]:
        """Begins to read one shard."""
        check_shard(self, shard, num_shards)
        source = open_cursor(self._stream, shard, num_shards, epoch)
        return PackedShard(source, self)

    def document(self, sample: Any) -> NDArray[np.int64]:
        """The tokens of one document, with its separator.

        Args:
            sample: A sample of the source.

        Raises:
            ValueError: They are not a list of whole numbers.
        """
        if self._tokens is not None:
            sample = self._tokens(sample)
        elif isinstance(sample, Mapping):
            sample = sample["input_ids"]
        found = np.asarray(sample)
        if found.ndim != 1 or (found.size and not np.issubdtype(found.dtype, np.integer)):
            raise ValueError(
                f"tokens of a document ({found.ndim} dimensions of {found.dtype}) must be a list "
                "of whole numbers: give `tokens` a function that returns them"
            )
        tokens = found.astype(np.int64)
        return tokens if self._separator is None else np.append(tokens, np.int64(self._separator))

    def pack(self, parts: list[NDArray[np.int64]]) -> dict[str, Any] | None:
        """The sample of some tokens, at most `length` of them; None if it is left out.

        Args:
            parts: Parts of documents, one after the other.
        """
        num_tokens = sum(len(part) for part in parts)
        if num_tokens < self._length:
            if num_tokens == 0 or self._remainder == "drop":
                return None
            if self._remainder == "pad":
                parts = [*parts, np.full(self._length - num_tokens, self._pad, dtype=np.int64)]
        return {"input_ids": np.concatenate(parts), "num_tokens": num_tokens}

    @property
    def length(self) -> int:
        """Number of tokens in a pack."""
        return self._length


class PackedShard(Iterator[Any]):
    """The packs of one shard."""

    def __init__(self, source: Cursor, packed: Packed) -> None:
        """Begins with the first pack.

        Args:
            source: The shard of documents, at its beginning.
            packed: The settings.
        """
        self._source = source
        self._packed = packed
        self._document: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._offset = 0
        # The place of the source before that document.
        self._place: Json = None

    def __next__(self) -> Any:
        parts: list[NDArray[np.int64]] = []
        missing = self._packed.length
        while missing:
            if self._offset == len(self._document):
                place = self._source.state_dict()
                try:
                    sample = next(self._source)
                except StopIteration:
                    break
                self._document, self._offset = self._packed.document(sample), 0
                self._place = place
            part = self._document[self._offset : self._offset + missing]
            parts.append(part)
            self._offset += len(part)
            missing -= len(part)
        pack = self._packed.pack(parts)
        if pack is None:
            raise StopIteration
        return pack

    def state_dict(self) -> Json:
        """The place of the source at which to read again, and the tokens used from there."""
        if self._offset == len(self._document):
            return [self._source.state_dict(), 0]
        return [self._place, self._offset]

    def load_state_dict(self, state: Json) -> None:
        """Continues at a place; reads the document in which the next pack begins.

        Args:
            state: What `state_dict` of the same shard returned.

        Raises:
            ValueError: That document has fewer tokens than were used of it.
        """
        place, offset = state
        self._source.load_state_dict(place)
        if offset == 0:
            return
        document = self._packed.document(next(self._source))
        if offset > len(document):
            raise ValueError(
                f"a document has {len(document)} tokens, of which {offset} were used before: its "
                "data, or `tokens`, has changed"
            )
        self._document, self._offset, self._place = document, offset, place
