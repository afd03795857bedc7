"""Untrusted text, made safe to print on one line.

A path, a line of a log, the message of an error or the name of another machine may contain
anything: terminal control sequences, a million characters, lines that look like ours.
"""

from __future__ import annotations

LONGEST = 2000
"""Largest number of characters of a printed line."""


def clean(text: str, longest: int = LONGEST) -> str:
    """One line of limited length, without control characters.

    Args:
        text: Any text. Runs of white space become one space, and characters that cannot be printed,
            such as those of control sequences and of changes of direction, become `?`.
        longest: Number of characters to keep; the number of dropped ones is appended.
    """
    # Cut first: splitting a text of many megabytes takes many times its memory.
    kept, left = text[: 4 * longest], max(0, len(text) - 4 * longest)
    words = " ".join(kept.split())
    left += max(0, len(words) - longest)
    words = words[:longest]
    if not words.isprintable():
        words = "".join(c if c.isprintable() else "?" for c in words)
    return f"{words}... ({left:,} more characters)" if left else words
