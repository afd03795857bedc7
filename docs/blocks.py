"""Runs the code of the documentation, so that no page can promise what does not work.

The `python` and `bash` blocks of a page run from top to bottom in a directory of their own, which
has a copy of `examples/`: the python blocks in one namespace, the others as commands. A block with
`title="name.py"` is also saved under that name, for the commands behind it. Where a `text` block
follows a `python` block with nothing but blank lines in between, it is what the block prints,
character for character. Blocks of any other language are left alone.

A block that cannot run just anywhere says above it, in a comment that the page does not show, what
it needs; it is counted, and not run:

    <!-- needs: a GPU -->

    python docs/blocks.py             # every page, and README.md
    python docs/blocks.py README.md   # these pages
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SECONDS = 180
"""How long a command may take."""
_BLOCK = re.compile(
    r"^(?:<!-- needs: (?P<needs>[^\n]+?) -->\n\s*?)?"
    r"^```(?P<language>python|bash)(?: title=\"(?P<title>[^\"\n]+)\")?[ ]*\n"
    r"(?P<code>.*?)^```[ ]*$(?:\n\s*?^```text[^\n]*\n(?P<text>.*?)^```[ ]*$)?",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """One block of a page that can be run."""

    line: int
    """Line of the page on which its code begins."""
    language: str
    """`python` or `bash`."""
    code: str
    """The code."""
    output: str | None
    """What it prints, if the page says so."""
    title: str | None
    """What it is to be saved as, if the page says so."""
    needs: str | None
    """What it takes to run it, if that is not to be had just anywhere."""


def pages() -> list[Path]:
    """Every page of the documentation, and the README."""
    return [ROOT / "README.md", *sorted(HERE.rglob("*.md"))]


def blocks(page: Path, languages: tuple[str, ...] = ("python",)) -> list[Block]:
    """The blocks of one page in these languages, in order.

    Raises:
        ValueError: A block is indented or not closed, and would be passed over.
    """
    text = page.read_text(encoding="utf-8")
    found = [
        Block(
            line=text.count("\n", 0, match.start("code")) + 1,
            language=match["language"],
            code=match["code"],
            output=match["text"],
            title=match["title"],
            needs=match["needs"],
        )
        for match in _BLOCK.finditer(text)
    ]
    for what, fences, runnable in (
        ("blocks", len(re.findall(r"```(?:python|bash)", text)), len(found)),
        ("needs", text.count("<!-- needs:"), sum(block.needs is not None for block in found)),
    ):
        if fences != runnable:
            raise ValueError(f"{page}: {fences} {what}, of which {runnable} are understood")
    return [block for block in found if block.language in languages]


def check(page: Path) -> None:
    """Runs one page, here.

    Raises:
        AssertionError: A block printed something other than its page says.
        subprocess.CalledProcessError: A command failed.
    """
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page, ("python", "bash")):
        if block.title is not None:
            Path(block.title).write_text(block.code, encoding="utf-8")
        if block.needs is None and block.language == "bash":
            _run(block.code)
        elif block.needs is None:
            _execute(page, block, namespace)


def _run(code: str) -> None:
    command = ["bash", "-euo", "pipefail", "-c", code]
    subprocess.run(command, check=True, timeout=SECONDS, stdout=subprocess.DEVNULL)


def _execute(page: Path, block: Block, namespace: dict[str, object]) -> None:
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


def main(names: list[str]) -> int:
    """Runs pages, several at once, and says what was run; returns how many have failed."""
    paths = [Path(name).resolve() for name in names] or pages()
    if len(paths) > 1:
        # What nearly every page imports takes longer than most of them.
        import torch._dynamo  # noqa: F401

        import resilin.training.parallel  # noqa: F401
    total: Counter[str] = Counter()
    waiting, running, failed = paths[::-1], {}, 0
    while waiting or running:
        while waiting and len(running) < min(4, os.cpu_count() or 1):
            page = waiting.pop()
            running[_start(page)] = page, time.monotonic()
        pid, status = os.wait()
        page, began = running.pop(pid)
        if status:
            print(f"{page}: failed", flush=True)
            failed += 1
            continue
        counts = Counter(block.needs or "run" for block in blocks(page, ("python", "bash")))
        print(f"{page}: {counts['run']} blocks in {time.monotonic() - began:.1f} s", flush=True)
        total += counts
    ran = total.pop("run", 0)
    print(f"{len(paths)} pages: {ran} blocks run, {total.total()} not")
    for need, count in total.most_common():
        print(f"  {count} need {need}")
    return failed


def _start(page: Path) -> int:
    """Starts a page in a process and a directory of its own, with which all that it does ends."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with tempfile.TemporaryDirectory(prefix="page-", ignore_cleanup_errors=True) as scratch:
            shutil.copytree(ROOT / "examples", Path(scratch, "examples"))
            os.chdir(scratch)
            sys.path[0] = scratch
            check(page)
            code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
