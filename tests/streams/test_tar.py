import io
import json
import tarfile

import pytest
import webdataset
from hypothesis import given
from hypothesis import strategies as st
from webdataset.tariterators import group_by_keys, tar_file_expander

from resilin.streams import FileStream, tar_samples
from tests.streams.sources import check_resumes, read

NAMES = st.sampled_from(
    ["a.txt", "a.seg.png", "b.JPG", "d/a.txt", "d/a.cls", "noext", ".hidden", "d.x/b.txt", "__m__"]
)


def write_tar(path, members, mode="w"):
    with tarfile.open(path, mode) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def stock(path):
    """The samples as the readers of WebDataset give them, nothing decoded."""
    # Its own opener would leave the file open.
    with open(path, "rb") as file:
        return list(group_by_keys(tar_file_expander([{"url": str(path), "stream": file}])))


@pytest.fixture
def shards(tmp_path):
    """Three tar files of unequal lengths, one of them empty, by the writer of WebDataset."""
    paths = []
    for number, num_samples in enumerate([5, 0, 8]):
        path = tmp_path / f"shard-{number:06d}.tar"
        with webdataset.TarWriter(str(path)) as writer:
            for i in range(num_samples):
                key = f"sample{number}-{i:04d}"
                writer.write(
                    {"__key__": key, "txt": f"text {i}", "cls": i, "json": {"number": number}}
                )
        paths.append(str(path))
    return paths


def test_samples_are_those_of_webdataset(shards):
    for path in shards:
        assert list(tar_samples(path)) == stock(path)
    assert len(list(tar_samples(shards[2]))) == 8
    first = next(tar_samples(shards[0]))
    assert first["txt"] == b"text 0"
    assert json.loads(first["json"]) == {"number": 0}


def test_a_stream_of_tar_files_continues_at_any_place(shards):
    stream = FileStream(shards, tar_samples, num_shards=2)
    keys = [sample["__key__"] for v in (0, 1) for sample in check_resumes(stream, v)]
    assert sorted(keys) == [sample["__key__"] for path in shards for sample in stock(path)]


@given(st.lists(NAMES, max_size=10, unique_by=lambda name: name.lower()))
def test_any_members_are_grouped_as_webdataset_groups_them(tmp_path_factory, names):
    path = tmp_path_factory.mktemp("tar") / "x.tar"
    write_tar(path, [(name, name.encode() * 3) for name in names])
    whole = stock(path)
    assert list(tar_samples(path)) == [{**sample, "__url__": str(path)} for sample in whole]
    for place in range(len(whole) + 1):
        samples = tar_samples(path)
        samples.skip(place)
        assert list(samples) == whole[place:]


def test_directories_and_links_are_no_samples(tmp_path):
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as tar:
        for name, kind in {"d.x": tarfile.DIRTYPE, "l.txt": tarfile.SYMTYPE}.items():
            info = tarfile.TarInfo(name)
            info.type = kind
            tar.addfile(info)
    assert list(tar_samples(path)) == stock(path) == []


@pytest.mark.parametrize("mode", ["w:gz", "w:xz"])
def test_compressed_files_and_urls_are_read(tmp_path, mode):
    path = tmp_path / "x.tar.packed"
    write_tar(path, [(f"{i}.txt", str(i).encode()) for i in range(20)], mode)
    for url in (path, f"file://{path}"):
        samples = tar_samples(url)
        samples.skip(7)
        assert [sample["txt"] for sample in samples] == [str(i).encode() for i in range(7, 20)]


def test_passing_over_samples_reads_none_of_their_content(tmp_path):
    path = tmp_path / "x.tar"
    write_tar(path, [(f"{i}.bin", bytes(100_000)) for i in range(20)])

    class Counting(io.FileIO):
        num_bytes = 0

        def read(self, size=-1):
            found = super().read(size)
            Counting.num_bytes += len(found)
            return found

    with Counting(path) as file, pytest.MonkeyPatch.context() as patch:
        opened = tarfile.open
        patch.setattr(tarfile, "open", lambda name, mode, fileobj: opened(None, mode, file))
        samples = tar_samples(path)
        samples.skip(19)
        assert len(next(samples)["bin"]) == 100_000
        del samples
    assert Counting.num_bytes < 150_000


def test_two_members_of_one_name_are_refused(tmp_path):
    path = tmp_path / "x.tar"
    write_tar(path, [("a.txt", b"1"), ("a.TXT", b"2")])
    with pytest.raises(ValueError, match=r"sample a has two members named txt"):
        next(tar_samples(path))
    with pytest.raises(ValueError, match="duplicate file name"):
        stock(path)


def test_a_file_that_has_become_shorter_is_recognised(shards):
    with pytest.raises(ValueError, match=r"has 2 samples fewer than were read before"):
        tar_samples(shards[0]).skip(7)


def test_a_file_that_is_not_there_is_an_error_of_the_first_sample(tmp_path):
    samples = tar_samples(tmp_path / "none.tar")
    with pytest.raises(FileNotFoundError):
        read(samples)
