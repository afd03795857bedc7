"""Runs the code of the documentation, so that no page can promise what does not work.

The `python` blocks of a page run from top to bottom in one namespace. Where a `text` block
follows a `python` block with nothing but blank lines in between, it is what the block prints,
character for character. Blocks of any other language are left alone.

    python docs/blocks.py             # every page
    python docs/blocks.py README.md   # these pages
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
_BLOCK = re.compile(
    r"^```python[^\n]*\n(?P<code>.*?)^```[ ]*$(?:\n\s*?^```text[^\n]*\n(?P<text>.*?)^```[ ]*$)?",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """One `python` block of a page."""

    line: int
    """Line of the page on which its code begins."""
    code: str
    """The code."""
    output: str | None
    """What it prints, if the page says so."""


def pages(folder: Path = HERE) -> list[Path]:
    """Every page of the documentation."""
    return sorted(folder.rglob("*.md"))


def blocks(page: Path) -> list[Block]:
    """The `python` blocks of one page, in order.

    Raises:
        ValueError: A block is indented or not closed, and would be passed over.
    """
    text = page.read_text(encoding="utf-8")
    found = [
        Block(text.count("\n", 0, match.start("code")) + 1, match["code"], match["text"])
        for match in _BLOCK.finditer(text)
    ]
    if len(found) != (fences := text.count("```python")):
        raise ValueError(f"{page}: {fences} python blocks, of which {len(found)} can be run")
    return found


def check(page: Path) -> int:
    """Runs one page and returns how many blocks it has.

    Raises:
        AssertionError: A block printed something other than its page says.
    """
    namespace: dict[str, object] = {"__name__": "__main__"}
    found = blocks(page)
    for block in found:
        # The blank lines make a traceback name the line of the page.
        code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        if block.output is not None and printed.getvalue() != block.output:
            raise AssertionError(
                f"{page}, line {block.line}: the page says\n{block.output}\nbut the block prints\n"
                f"{printed.getvalue()}"
            )
    return len(found)


if __name__ == "__main__":
    for path in [Path(name) for name in sys.argv[1:]] or pages():
        print(f"{path}: {check(path)} blocks")
