"""Words of others, made fit to be printed on one line.

A path, a line of a log, the message of an error or the name of another machine may hold anything:
what a terminal takes for a command, a million characters, lines that look like ours.
"""

from __future__ import annotations

LONGEST = 2000
"""Characters of a line that is printed, at most."""


def clean(text: str, longest: int = LONGEST) -> str:
    """One line, without what a terminal would take for a command, and not too long.

    Args:
        text: Any text. Runs of white space become one space, and characters that cannot be printed,
            such as those of control sequences and of changes of direction, become `?`.
        longest: Characters that are kept; how many were left out is said in their place.
    """
    # Cut first: splitting a text of many megabytes takes many times its memory.
    kept, left = text[: 4 * longest], max(0, len(text) - 4 * longest)
    words = " ".join(kept.split())
    left += max(0, len(words) - longest)
    words = words[:longest]
    if not words.isprintable():
        words = "".join(c if c.isprintable() else "?" for c in words)
    return f"{words}... ({left:,} more characters)" if left else words
