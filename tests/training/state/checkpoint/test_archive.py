"""Archives that a tensor may come in, and what else calls itself one."""

import io
import struct
import zipfile

import pytest
import torch

from resilin.training.state.checkpoint.archive import check
from tests.training.state.checkpoint.snapshots import DTYPES

SIZE = 32


def saved(tensor):
    data = io.BytesIO()
    torch.save(tensor, data)
    return data.getvalue()


PLAIN = saved(torch.zeros(8))


def rewritten(*, compression=zipfile.ZIP_STORED, more=(), comment=b""):
    """The records of a plain tensor in an archive of Python's, with others."""
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(PLAIN)) as old,
        zipfile.ZipFile(packed, "w", compression) as new,
    ):
        for record in old.infolist():
            new.writestr(record.filename, old.read(record))
        for name, content in more:
            new.writestr(name, content)
        new.comment = comment
    return packed.getvalue()


def central(data, name, field, value):
    """Writes a number into the directory's entry of one record; fields as in its structure."""
    place, size = {"compressed": (20, 4), "size": (24, 4), "header": (42, 4), "flags": (8, 2)}[
        field
    ]
    # The name is in its own header too, and last in the directory.
    at = data.rindex(name.encode()) - 46
    assert data[at : at + 4] == b"PK\x01\x02"
    changed = bytearray(data)
    changed[at + place : at + place + size] = value.to_bytes(size, "little")
    return bytes(changed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 7), (3, 5), (70000,)])
def test_what_torch_saves_passes(dtype, shape):
    tensor = torch.zeros(shape).to(dtype)
    check(saved(tensor), tensor.nbytes)


def test_an_archive_with_short_sizes_passes():
    data = rewritten()
    assert b"PK\x06\x06" not in data
    check(data, SIZE)


def test_a_link_is_a_record_like_any_other():
    link = zipfile.ZipInfo("archive/link")
    link.external_attr = 0o120777 << 16
    check(rewritten(more=[(link, b"/etc/passwd")]), SIZE)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (rewritten(compression=zipfile.ZIP_DEFLATED), "stored records expected, found 'archive/"),
        (rewritten(compression=zipfile.ZIP_BZIP2), "stored records expected"),
        (rewritten(more=[("archive/data/1", bytes(20000))]), "at most 16384 bytes expected beside"),
        (rewritten(more=[(f"archive/{i}", b"") for i in range(400)]), "a directory of at most"),
        (rewritten(more=[("b/data/0", bytes(32))]), r"one tensor of 32 bytes expected, found \[32"),
        (rewritten(comment=b"PK\x05\x06"), "does not end where its bytes do"),
        (rewritten() + bytes(100), "does not end where its bytes do"),
        (rewritten() + PLAIN, "the end of the directory is at"),
        (PLAIN + rewritten(), "the directory ends at"),
        (b"", "an archive of torch.save expected, found b''"),
        (b"PK\x03\x04", "does not end where its bytes do"),
        (saved(torch.zeros(9)), r"one tensor of 32 bytes expected, found \[36\]"),
        (saved({}), "one tensor of 32 bytes expected, found none"),
        (saved([torch.zeros(8), torch.zeros(8)][:1] * 2 + [torch.zeros(5000)]), "at most 16384"),
        # What the directory says is more than there is.
        (central(rewritten(), "archive/data/0", "size", 2**31), "stored records expected"),
    ],
)
def test_everything_else_is_refused(data, said):
    with pytest.raises(ValueError, match=said):
        check(data, SIZE)


def test_a_tensor_beyond_the_end_of_the_archive_is_refused():
    data = rewritten()
    for field in ("compressed", "size"):
        data = central(data, "archive/data/0", field, 2**31)
    with pytest.raises(ValueError, match="a tensor of 2147483648 bytes in an archive of"):
        check(data, 2**31)


def test_records_that_overlap_take_no_more_than_the_archive_has():
    # Each of them is the tensor once more, and the sum of them is what would be taken.
    data = rewritten(more=[(f"archive/data/{i}", bytes(600)) for i in range(1, 26)])
    for i in range(2, 26):
        data = central(data, f"archive/data/{i}", "header", 0)
    check(data, SIZE)
    more = rewritten(more=[(f"archive/data/{i}", bytes(700)) for i in range(1, 26)])
    with pytest.raises(ValueError, match="at most 16384 bytes expected beside the tensor"):
        check(more, SIZE)


def test_two_ends_are_not_taken_for_one():
    # Python reads the long form of the end where the locator is, torch where the locator says.
    at = PLAIN.rindex(b"PK\x06\x07")
    (where,) = struct.unpack_from("<Q", PLAIN, at + 8)
    moved = bytearray(PLAIN)
    struct.pack_into("<Q", moved, at + 8, where - 1)
    with pytest.raises(ValueError, match=f"is at {where - 1}, where {where} was expected"):
        check(bytes(moved), SIZE)
