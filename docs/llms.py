"""Writes docs/llms.txt: the pages of the site in one plain list, for programs that read it.

Sections and titles are those of the navigation in mkdocs.yml. What is said of a page is its first
sentence, or that of the module that it documents.

    python docs/llms.py
"""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
Entry: TypeAlias = "str | dict[str, str | list[Entry]]"
HEAD = """\
# resilin

> {description}

Install with `pip install resilin` (Python 3.10 or later, PyTorch 2.8 or later, Linux).
`resilin demo --live` shows a job that loses a worker and continues. A training loop changes in five
places: `resilin.init_process_group()`, `resilin.AdaptiveDataParallel(model, optimizer)`,
`resilin.AdaptiveDataLoader(dataset, batch_size=...)`, optionally
`loader.autoscale_batch_size(...)`, and `for epoch in resilin.remaining_epochs_until(n)`.
Run it with `resilin run --nproc N script.py`; with `--live` the survivors of a lost worker keep
their processes. `batch_size` is the global batch, for any number of workers.
"""


def configuration() -> dict[str, object]:
    """What mkdocs.yml says."""
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def pages(entries: list[Entry]) -> Iterator[tuple[str | None, str]]:
    """Titles, if the navigation has them, and paths of all pages under these entries, in order."""
    for entry in entries:
        if isinstance(entry, str):
            yield None, entry
            continue
        for title, below in entry.items():
            if isinstance(below, str):
                yield title, below
            else:
                yield from pages(below)


def heading(path: Path) -> str:
    """First heading of a page, or the module that it documents."""
    text = path.read_text(encoding="utf-8")
    found = re.search(r"^# (.+)$", text, re.MULTILINE) or re.search(r"^::: (\S+)", text)
    if found is None:
        raise ValueError(f"{path} has neither a heading nor a module")
    return found[1]


def sentence(path: Path) -> str:
    """First sentence of a page, without markup; that of its module if the page has no text."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for paragraph in re.split(r"\n\s*\n", text):
        if re.match(r"[A-Za-z`*\[]", paragraph.strip()):
            return first(paragraph)
    found = re.search(r"^#*\s*::: (\S+)", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"{path} has neither a paragraph nor a module")
    return first(docstring(found[1]))


def docstring(name: str) -> str:
    """Docstring of a module, or of a class or function in one."""
    text = inspect.getdoc(pkgutil.resolve_name(name))
    if not text:
        raise ValueError(f"{name} has no docstring")
    return text


def first(paragraph: str) -> str:
    """First sentence of a paragraph, as plain text on one line."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
    text = text.replace("**", "").replace("`", "")
    return (
        re.split(r"(?<=[.?])\s+(?=[A-Z0-9\[-]|resilin)", text + " ", maxsplit=1)[0]
        .strip()
        .rstrip(":")
    )


def draw() -> str:
    """The text of the file."""
    settings = configuration()
    parts = [HEAD.format(description=settings["site_description"])]
    for entry in settings["nav"]:  # type: ignore[attr-defined]
        ((section, below),) = entry.items()
        parts.append(f"\n## {section}\n\n")
        for title, page in pages([{section: below}]):
            path = HERE / page
            address = page.removesuffix(".md") + ".html"
            parts.append(f"- [{title or heading(path)}]({address}): {sentence(path)}\n")
    return "".join(parts)


if __name__ == "__main__":
    (HERE / "llms.txt").write_text(draw(), encoding="utf-8")
