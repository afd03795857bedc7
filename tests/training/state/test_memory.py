"""Copies in memory: what a crash at any moment leaves behind, and what is read of it."""

import json
import os
import shutil
import signal
import struct
import sys
import tempfile
import textwrap
import zlib
from pathlib import Path

import pytest
import torch

from resilin.training.state import memory_file, memory_scan
from resilin.training.state.memory import MemoryCopies, Place
from resilin.training.state.snapshot import Snapshot, Version, split
from tests import forked

ROOT = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
NAMES = "abcdefgh"
HEADER = struct.Struct("<8sQqqqQQI")


@pytest.fixture
def directory():
    with tempfile.TemporaryDirectory(prefix="resilin-test-", dir=ROOT) as root:
        yield Path(root) / "job"


def state(step, generation=0, size=5):
    """A state of which every tensor says which step it is of."""
    made = {name: torch.full((size + i,), step) for i, name in enumerate(NAMES)}
    tree, tensors = split("m", made)
    return Snapshot(Version(generation, step), {"m": tree, "job": {"replicas": 1}}, tensors)


def place(local=0, num=1, host=0):
    return Place(host=host, local_process=local, num_local_processes=num, process=10 * host + local)


def keep(directory, snapshot, num=1, but=(), host=0, copies=None):
    """All replicas of a host but some keep a state; returns what they keep it with."""
    copies = copies or [MemoryCopies(directory) for _ in range(num)]
    for local in set(range(num)) - set(but):
        sums = {"sums/start/0": {"n": float(local)}}
        copies[local].keep(snapshot, sums, place(local, num, host))
    return copies


def check(directory, step, generation=0):
    copies = MemoryCopies(directory)
    snapshot = copies.scan().read(copies.scan().versions[0])
    assert snapshot.version == Version(generation, step)
    read = snapshot.state("m")
    assert {name: set(t.tolist()) for name, t in read.items()} == {name: {step} for name in NAMES}


def test_the_newest_state_is_found_by_another_process(directory):
    copies = keep(directory, state(1))
    for step in (2, 3, 4):
        keep(directory, state(step), copies=copies)
    # Written in turns: the state before the newest is there, and no older one.
    assert MemoryCopies(directory).scan().versions == [Version(0, 4), Version(0, 3)]
    check(directory, 4)
    assert len(list(directory.iterdir())) == 2
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in files(directory)} == {0o600}


def files(directory):
    return sorted(directory.iterdir())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.empty(0, 3),
        torch.ones(3, 0, dtype=torch.bool),
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(12)[::3],
        torch.ones(1).expand(5),
        torch.tensor([1.5, float("nan"), -0.0]).bfloat16(),
        torch.ones(7, dtype=torch.float8_e4m3fn),
        torch.tensor([True, False, True]),
        torch.tensor([1j, 2]),
        torch.tensor([1j, 2]).conj(),
        torch.tensor([2**16 - 1], dtype=torch.uint16),
        torch.ones(3, requires_grad=True),
    ],
    ids=lambda t: f"{str(t.dtype)[6:]}{list(t.shape)}",
)
def test_every_kind_of_tensor(directory, tensor):
    tree, tensors = split("x", {"odd": torch.ones(3, dtype=torch.int8), "t": tensor})
    MemoryCopies(directory).keep(Snapshot(Version(0, 1), {"x": tree}, tensors), {}, place())
    again = MemoryCopies(directory).scan().read(Version(0, 1)).state("x")["t"]
    assert (again.dtype, again.shape) == (tensor.dtype, tensor.shape)
    raw = [
        t.detach().resolve_conj().contiguous().view(-1).view(torch.uint8) for t in (again, tensor)
    ]
    assert raw[0].equal(raw[1])


def test_a_state_without_tensors(directory):
    MemoryCopies(directory).keep(Snapshot(Version(0, 1), {"x": 1}, {}), {}, place())
    assert MemoryCopies(directory).scan().read(Version(0, 1)) == Snapshot(
        Version(0, 1), {"x": 1}, {}
    )


def test_what_was_read_is_a_copy(directory):
    copies = keep(directory, state(1))
    read = MemoryCopies(directory).scan().read(Version(0, 1)).state("m")
    for step in (2, 3):
        keep(directory, state(step), copies=copies)
    assert read["a"].tolist() == [1] * 5
    read["a"].fill_(9)
    check(directory, 3)


@pytest.mark.parametrize("num", [2, 3, 5])
def test_any_one_replica_may_be_missing(directory, num):
    copies = keep(directory, state(1), num)
    for step in range(2, num + 2):
        keep(directory, state(step), num, but=[step - 2], copies=copies)
        check(directory, step)
        assert sorted(copies[0].scan().sums(Version(0, step))) == sorted(
            set(range(num)) - {step - 2}
        )


@pytest.mark.parametrize("gone", [(0, 1), (1, 2), (0, 2)])
def test_two_missing_neighbours_lose_the_share_between_them(directory, gone):
    copies = keep(directory, state(1), 3)
    keep(directory, state(2), 3, but=gone, copies=copies)
    assert MemoryCopies(directory).scan().versions == [Version(0, 1)]
    with pytest.raises(LookupError, match="no complete copy of step 2 of generation 0"):
        MemoryCopies(directory).scan().read(Version(0, 2))
    check(directory, 1)


def test_two_missing_replicas_that_are_no_neighbours_lose_nothing(directory):
    copies = keep(directory, state(1), 4)
    keep(directory, state(2), 4, but=(0, 2), copies=copies)
    check(directory, 2)


def test_hosts_that_share_a_directory_do_not_fill_in_for_each_other(directory):
    keep(directory, state(1), 3, but=(0, 1), host=0)
    keep(directory, state(1), 3, but=(1, 2), host=1)
    # Together they have all shares, but each host deals for itself.
    assert MemoryCopies(directory).scan().versions == []
    keep(directory, state(1), 2, host=2)
    check(directory, 1)


@pytest.mark.parametrize(("was", "left", "now"), [(5, 2, 4), (4, 2, 3), (3, 1, 2)])
def test_leftovers_of_another_number_of_replicas_are_not_mixed_in(directory, was, left, now):
    # They died in their first copy, and the job began anew: the same version, another deal.
    keep(directory, state(0), was, but=set(range(was)) - {left})
    copies = keep(directory, state(0), now, but=range(1, now))
    for version in MemoryCopies(directory).scan().versions:
        read = MemoryCopies(directory).scan().read(version)
        assert sorted(read.tensors) == sorted(state(0).tensors)
    for local in range(1, now):
        copies[local].keep(state(0), {}, place(local, now))
    check(directory, 0)


def test_the_layout_may_change_from_step_to_step(directory):
    copies = keep(directory, state(1), 2)
    for step, size in [(2, 5000), (3, 5), (4, 0), (5, 70_000)]:
        keep(directory, state(step, size=size), 2, copies=copies)
        read = MemoryCopies(directory).scan().read(Version(0, step)).state("m")
        assert [len(t) for t in read.values()] == [size + i for i in range(len(NAMES))]
        assert all((t == step).all() for t in read.values())
        assert MemoryCopies(directory).scan().versions[1:] == [Version(0, step - 1)]


def test_tensors_come_and_go_and_change_their_type(directory):
    copies = MemoryCopies(directory)
    x, y = {"x": torch.ones(2)}, {"y": torch.ones(1)}
    for step, tensors in enumerate([{}, x, {"x": torch.ones(2).half(), **y}, y]):
        copies.keep(Snapshot(Version(0, step), {}, tensors), {}, place())
        read = MemoryCopies(directory).scan().read(Version(0, step)).tensors
        assert {n: t.dtype for n, t in read.items()} == {n: t.dtype for n, t in tensors.items()}


def test_the_tree_may_outgrow_its_room(directory):
    copies = keep(directory, state(1))
    for step, length in [(2, 10), (3, 200_000), (4, 10), (5, 3_000_000)]:
        grown = state(step)
        grown.tree["text"] = "x" * length
        keep(directory, grown, copies=copies)
        check(directory, step)
        assert len(MemoryCopies(directory).scan().read(Version(0, step)).tree["text"]) == length
        assert MemoryCopies(directory).scan().versions[1] == Version(0, step - 1)


def run(code, *arguments, timeout=60):
    """Runs code that has the helpers of this module, in a process of its own."""
    root = Path(__file__).parents[__name__.count(".")]
    preamble = f"import sys\nsys.path.insert(0, {str(root)!r})\nfrom {__name__} import *\n"
    return forked.run(
        [sys.executable, "-c", preamble + textwrap.dedent(code), *map(str, arguments)],
        timeout=timeout,
        capture_output=True,
        text=True,
        check=False,
    )


CRASHES = """
# Fork, so that one import of torch is enough for all moments of death.
directory, grown = Path(sys.argv[1]), sys.argv[2] == "True"
copies = MemoryCopies(directory)
for step in (1, 2):
    copies.keep(state(step), {}, place())
left = 0

def tick():
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1

class Killing:
    # A header, or a module, whose user may die before and behind each of its calls.
    def __init__(self, real):
        self.real = real

    def __getattr__(self, name):
        value = getattr(self.real, name)
        if not callable(value) or isinstance(value, type):
            return value
        def call(*args, **kwargs):
            tick()
            result = value(*args, **kwargs)
            tick()
            return result
        return call

real_move = memory_file.memmove
def memmove(target, source, num_bytes):
    # Some of the bytes are copied when the process dies.
    for part in range(10):
        real_move(target, source, num_bytes * part // 10)
        tick()
    real_move(target, source, num_bytes)
    tick()

moment = 0
while True:
    shutil.copytree(directory, f"{directory}-{moment}")
    pid = os.fork()
    if pid == 0:
        left = moment
        copies = MemoryCopies(Path(f"{directory}-{moment}"))
        memory_file._HEADER = Killing(memory_file._HEADER)
        memory_file.os, memory_file.mmap = Killing(os), Killing(memory_file.mmap)
        memory_file.process_gone = lambda *_: True  # the parent, who wrote what is there, lives
        memory_file.memmove = memmove
        # The next turn is that of the older of the two, as it was for the parent.
        new = state(3, size=50 if grown else 5)
        new.tree["text"] = "x" * (200_000 if grown else 1)
        copies.keep(new, {}, place())
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0
        break
    assert os.WTERMSIG(status) == signal.SIGKILL
    moment += 1
print(moment)
"""


@pytest.mark.parametrize("grown", [False, True], ids=["same layout", "new layout"])
def test_a_kill_at_any_moment_of_a_copy_leaves_the_state_before_it(directory, grown):
    result = run(CRASHES, directory, grown)
    assert result.returncode == 0, result.stderr
    moments = int(result.stdout)
    assert moments > 15
    newest = []
    for moment in range(moments + 1):
        copies = MemoryCopies(Path(f"{directory}-{moment}"))
        newest.append(copies.scan().versions[0].step)
        check(copies.directory, newest[-1])
    assert sorted(set(newest)) == [2, 3]
    assert newest == sorted(newest), "complete once, complete for good"
    # Only the last moments are behind the mark that it is complete.
    assert newest[-3] == 2


def test_a_live_writer_that_is_killed_while_it_overwrites_its_own_file(directory):
    result = run(
        """
        copies = MemoryCopies(Path(sys.argv[1]))
        for step in (1, 2, 3, 4):
            copies.keep(state(step), {}, place())
        real = memory_file.memmove
        def memmove(target, source, num_bytes):
            real(target, source, num_bytes // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        memory_file.memmove = memmove
        copies.keep(state(5), {}, place())
        """,
        directory,
    )
    assert result.returncode == -signal.SIGKILL
    assert MemoryCopies(directory).scan().versions == [Version(0, 4)]
    check(directory, 4)


def write_header(path, **changes):
    names = ["magic", "complete", "generation", "step", "epoch", "end", "size", "crc"]
    data = bytearray(path.read_bytes())
    fields = dict(zip(names, HEADER.unpack_from(data), strict=True)) | changes
    HEADER.pack_into(data, 0, *fields.values())
    path.write_bytes(data)


@pytest.mark.parametrize(
    "changes",
    [
        {"complete": 0},
        {"complete": 0, "crc": 0},
        {"crc": 0},
        {"magic": b"\0" * 8},
        {"size": 0},
        {"size": 10},
        {"end": 4096},
        {"end": 2**40},
        {"size": 2**63 - 1},
        {"end": 2**64 - 1},
    ],
    ids=str,
)
def test_a_header_that_says_less_than_all_is_passed_over(directory, changes):
    copies = keep(directory, state(1))
    keep(directory, state(2), copies=copies)
    newest = max(files(directory), key=lambda p: HEADER.unpack_from(p.read_bytes())[3])
    write_header(newest, **changes)
    assert MemoryCopies(directory).scan().versions == [Version(0, 1)]
    check(directory, 1)


@pytest.mark.parametrize("length", [0, 3, HEADER.size, 4096, 4200])
def test_a_file_that_was_cut_off_is_passed_over(directory, length):
    copies = keep(directory, state(1))
    keep(directory, state(2), copies=copies)
    newest = max(files(directory), key=lambda p: HEADER.unpack_from(p.read_bytes())[3])
    os.truncate(newest, length)
    check(directory, 1)


def test_files_of_another_format_are_passed_over(directory):
    keep(directory, state(1))
    path = files(directory)[0]
    data = path.read_bytes()
    end, size = HEADER.unpack_from(data)[5:7]
    meta = json.loads(data[end : end + size])
    text = json.dumps(meta | {"format": memory_file.FORMAT + 1}).encode()
    path.write_bytes(data[:end] + text)
    write_header(path, size=len(text), crc=zlib.crc32(text))
    assert MemoryCopies(directory).scan().versions == []


def test_strange_things_in_the_directory_are_passed_over(directory):
    keep(directory, state(1))
    (directory / "notes.txt").write_text("mine")
    (directory / "0-broken").write_bytes(b"resilin\n" + bytes(20))
    (directory / "folder").mkdir()
    check(directory, 1)


def test_forgetting_earlier_generations_and_then_all(directory):
    for generation in (0, 2, 10):
        keep(directory, state(1, generation), 2)
    copies = MemoryCopies(directory)
    copies.forget(before=10)
    assert copies.scan().versions == [Version(10, 1)]
    copies.forget()
    assert files(directory) == []
    copies.forget()  # Whoever comes second finds nothing, and says nothing.
    shutil.rmtree(directory)
    copies.forget()


def test_keeping_goes_on_behind_forgetting(directory):
    copies = keep(directory, state(1))
    copies[0].forget()
    for step in (2, 3):
        keep(directory, state(step), copies=copies)
        check(directory, step)


def test_forgetting_touches_only_what_was_written_here(directory):
    copies = keep(directory, state(1))[0]
    for name in ("notes.txt", "2026-11-15.log", "7", "7-up"):
        (directory / name).write_text("mine")
    (directory / "3-d").mkdir()
    copies.forget()
    left = sorted(path.name for path in files(directory))
    assert left == ["2026-11-15.log", "3-d", "7", "7-up", "notes.txt"]


@pytest.mark.parametrize("what", ["replaced", "removed", "shortened"])
def test_a_file_that_changes_while_it_is_read_is_not_there_any_more(directory, monkeypatch, what):
    copies = keep(directory, state(1, size=5000))
    real = memory_scan.read_pieces

    def read(file, wanted):
        if what == "replaced":
            copies[0]._turn = 1 - copies[0]._turn
            keep(directory, state(2, size=1), copies=copies)
        elif what == "removed":
            file.path.unlink()
        else:
            os.truncate(file.path, 4100)
        return real(file, wanted)

    monkeypatch.setattr(memory_scan, "read_pieces", read)
    with pytest.raises(LookupError):
        MemoryCopies(directory).scan().read(Version(0, 1))


def test_a_file_that_is_overwritten_in_place_while_it_is_read(directory, monkeypatch):
    copies = keep(directory, state(1))
    real = memory_scan.read_pieces

    def read(file, wanted):
        for step in (2, 3):
            keep(directory, state(step), copies=copies)
        return real(file, wanted)

    monkeypatch.setattr(memory_scan, "read_pieces", read)
    with pytest.raises(LookupError, match="overwritten while it was read"):
        MemoryCopies(directory).scan().read(Version(0, 1))


def test_a_full_memory_shows_as_an_error_and_leaves_the_state_before(directory):
    result = run(
        """
        import resource
        directory = Path(sys.argv[1])
        copies = MemoryCopies(directory)
        for step in (1, 2):
            copies.keep(state(step), {}, place())
        large, wordy = state(3, size=100_000), state(4)
        wordy.tree["text"] = "x" * 300_000
        unlimited = resource.RLIM_INFINITY
        for new in (large, wordy):
            resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, unlimited))
            before = MemoryCopies(directory).scan().versions[0]
            try:
                copies.keep(new, {}, place())
            except OSError:
                pass
            else:
                raise AssertionError("there was room")
            assert MemoryCopies(directory).scan().versions == [before]
            check(directory, before.step)
            # There is room again: the same turns go on as if nothing had been.
            resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))
            for _ in range(2):
                copies.keep(new, {}, place())
                check(directory, new.version.step)
        """,
        directory,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777, 0o1777, 0o720])
def test_a_directory_that_others_can_write_to_is_refused(directory, mode):
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(ValueError, match=f"writable by no other; .* has mode {mode & 0o777:o}"):
        MemoryCopies(directory)


@pytest.mark.parametrize("umask", [0, 0o002, 0o077])
def test_what_is_made_is_private_whatever_the_umask(directory, umask):
    before = os.umask(umask)
    try:
        keep(directory / "deeper" / "job", state(1))
    finally:
        os.umask(before)
    for made in (directory, directory / "deeper", directory / "deeper" / "job"):
        assert made.stat().st_mode & 0o022 == 0, f"others can replace what is in {made}"


root_only = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")


@root_only
def test_a_directory_of_somebody_else_is_refused(directory):
    directory.mkdir(mode=0o700)
    os.chown(directory, 65534, -1)
    with pytest.raises(ValueError, match=r"must belong to user 0 .* belongs to 65534"):
        MemoryCopies(directory)


@root_only
def test_a_directory_whose_parent_is_somebody_elses_is_refused(directory):
    # Its owner could put another directory in its place.
    directory.mkdir(mode=0o755)
    os.chown(directory, 65534, -1)
    with pytest.raises(ValueError, match="65534"):
        MemoryCopies(directory / "job")


def test_what_is_in_the_way_is_not_followed(directory):
    directory.mkdir(mode=0o700)
    victim = directory.parent / "victim"
    victim.write_text("precious")
    (directory / "0-0-0-0-1").symlink_to(victim)
    keep(directory, state(1))
    assert victim.read_text() == "precious"
    check(directory, 1)


def test_copies_leave_room_for_others(directory, monkeypatch):
    monkeypatch.setattr(memory_file, "capacity", lambda _: 10_000_000)
    copies = MemoryCopies(directory)
    copies.keep(state(1, size=50_000), {}, place())
    with pytest.raises(OSError, match="more than half of its 10000000 bytes"):
        copies.keep(state(2, size=100_000), {}, place())
    assert copies.scan().versions == [Version(0, 1)]


def test_a_replica_that_is_done_takes_only_its_own_away(directory):
    first, second = MemoryCopies(directory), MemoryCopies(directory)
    first.keep(state(1), {}, place(0, 2))
    second.keep(state(1), {}, place(1, 2))
    first.withdraw()
    check(directory, 1)
    second.withdraw()
    assert list(directory.iterdir()) == []
