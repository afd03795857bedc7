"""Sums of a replica that others read after its death."""

from resilin.training.state.sums_file import SumsFile, forget, read


def sums(number):
    return lambda: {"sums/start/0": {"n": number}}


def test_the_sums_of_a_committed_step_are_those_of_its_body(tmp_path):
    file = SumsFile(tmp_path, "a")
    file.step_begins(4, sums(1))
    file.changed(5, sums(2))
    assert read(tmp_path, "a", 4) == sums(1)()  # the step was not committed
    assert read(tmp_path, "a", 5) == sums(2)()
    assert read(tmp_path, "a", 6) is None


def test_a_member_that_was_a_step_ahead_has_those_before_it(tmp_path):
    file = SumsFile(tmp_path, "a")
    file.step_begins(4, sums(1))
    file.step_begins(5, sums(2))
    assert read(tmp_path, "a", 4) == sums(1)()
    assert read(tmp_path, "a", 5) == sums(2)()
    file.step_begins(6, sums(3))
    assert read(tmp_path, "a", 4) is None


def test_shorter_sums_are_read_whole_and_damaged_ones_not_at_all(tmp_path):
    file = SumsFile(tmp_path, "a")
    file.step_begins(2, sums(10**9))
    file.step_begins(2, sums(1))
    assert read(tmp_path, "a", 2) == sums(1)()
    path = tmp_path / "sums-a-0"
    data = bytearray(path.read_bytes())
    data[-12] ^= 1
    data[30] ^= 1
    path.write_bytes(data)
    assert read(tmp_path, "a", 2) is None


def test_they_can_be_forgotten_and_need_not_be_written(tmp_path):
    SumsFile(tmp_path, "a").step_begins(2, sums(1))
    forget(tmp_path, "a")
    assert read(tmp_path, "a", 2) is None
    SumsFile(None, "a").step_begins(2, sums(1))
