"""The zip archive that `torch.save` makes of one tensor, checked before `torch.load` sees it.

`torch.load` allocates what the archive's directory announces, and trusts the sizes that the pickle
in it announces. Half a megabyte of compressed zeros becomes as many gigabytes as somebody likes
before the tensor can be compared with `COMMIT.json`. So the directory is read first: what
`torch.save` writes is stored, never compressed, and has one record with the bytes of the tensor.

Python's reader and that of torch must not see two different directories in the same bytes. Hence
the end of the directory has to be the end of the archive, and it has to be said once only.
"""

from __future__ import annotations

import io
import struct
import zipfile

_FIRST = b"PK\x03\x04"
"""First bytes of an archive that `torch.load` does not take for an older format."""
_END = struct.Struct("<4s4H2LH")
"""The end of the directory, without a comment."""
_LOCATOR = struct.Struct("<4sLQL")
"""Before it, in an archive with sizes of 64 bits: where the long form of the end is."""
_END64 = struct.Struct("<4sQ2H2L4Q")
"""The long form of the end, right before the locator."""
_MOST_DIRECTORY = 1 << 14
"""Bytes of the directory. torch 2.13 writes 463, for 7 records."""
_MOST_OTHER = 1 << 14
"""Bytes of all records but the tensor. torch 2.13 writes 201; the pickle has 150 of them."""
_TENSOR = "/data/0"
"""Suffix of the record that has the bytes of the only tensor."""


def check(data: bytes, num_bytes: int) -> None:
    """Checks that an archive takes no more memory than it has bytes, and holds one tensor.

    Args:
        data: The archive.
        num_bytes: The size of the tensor in it, without anything around it.

    Raises:
        ValueError: It is no archive of `torch.save`, or holds anything else.
    """
    _check_end(data)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise ValueError(f"an archive of torch.save expected, found: {error}") from None
    other = 0
    sizes = []
    for record in records:
        if record.compress_type != zipfile.ZIP_STORED or record.file_size != record.compress_size:
            raise ValueError(
                f"stored records expected, found {record.filename!r} with {record.compress_size} "
                f"bytes that become {record.file_size}"
            )
        if record.filename.endswith(_TENSOR):
            sizes.append(record.file_size)
        else:
            other += record.file_size
    if sizes != [num_bytes]:
        raise ValueError(f"one tensor of {num_bytes} bytes expected, found {sizes or 'none'}")
    if num_bytes > len(data):
        raise ValueError(f"a tensor of {num_bytes} bytes in an archive of {len(data)}")
    if other > _MOST_OTHER:
        raise ValueError(
            f"at most {_MOST_OTHER} bytes expected beside the tensor, found {other} in "
            f"{len(records) - 1} records"
        )


def _check_end(data: bytes) -> None:
    """Checks that the directory ends where the archive does, and is small."""
    if not data.startswith(_FIRST):
        raise ValueError(f"an archive of torch.save expected, found {data[:4]!r} at its beginning")
    if len(data) < _END.size or not data[-_END.size :].startswith(b"PK\x05\x06"):
        raise ValueError("the archive does not end where its bytes do")
    *_, size, offset, comment = _END.unpack_from(data, len(data) - _END.size)
    if comment:
        raise ValueError(f"an archive without a comment expected, found one of {comment} bytes")
    end = len(data) - _END.size
    locator = end - _LOCATOR.size
    if locator >= 0 and data[locator : locator + 4] == b"PK\x06\x07":
        end = locator - _END64.size
        where = _LOCATOR.unpack_from(data, locator)[2]
        if end < 0 or where != end or data[end : end + 4] != b"PK\x06\x06":
            raise ValueError(f"the end of the directory is at {where}, where {end} was expected")
        *_, size, offset = _END64.unpack_from(data, end)
    if size > _MOST_DIRECTORY:
        raise ValueError(f"a directory of at most {_MOST_DIRECTORY} bytes expected, found {size}")
    if offset + size != end:
        raise ValueError(
            f"the directory ends at {offset + size}, where {end} was expected: it must be the last "
            "part of the archive"
        )
