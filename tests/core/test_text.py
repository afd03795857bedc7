import pytest

from resilin.core.text import LONGEST, clean


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("plain words", "plain words"),
        ("  two\n lines\tand a tab ", "two lines and a tab"),
        ("\x1b]0;title\x07\x1b[2J", "?]0;title??[2J"),
        ("a\u202eb\u200bc", "a?b?c"),  # directions and spaces that are not seen
        ("\udcff name", "? name"),  # of a file whose name is no text
        ("\x9b31m", "?31m"),  # the short form of an escape sequence
        ("größer 数", "größer 数"),
        ("", ""),
    ],
)
def test_a_line_that_a_terminal_only_shows(text, line):
    assert clean(text) == line


def test_a_long_text_is_cut_and_says_so():
    assert clean("x" * LONGEST) == "x" * LONGEST
    assert clean("x" * (LONGEST + 1)) == "x" * LONGEST + "... (1 more characters)"
    line = clean("a\x1b" * 10**6, longest=10)
    assert line == "a?a?a?a?a?... (1,999,990 more characters)"
    assert len(clean(" " * 10**7 + "x")) < 100
