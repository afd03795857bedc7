"""The prose of the package: plain technical English, in docstrings, comments, messages and docs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "resilin"
QUESTION = re.compile(r"(What|Who|How|Which|Why|Where)\b")
"""A first line is a noun phrase or an imperative; `Whether ...` is fine for a bool."""
BANNED = {
    r"\b(go|goes|going|went|gone) on\b": "resume, or continue",
    r"\b(told|tells?|telling) of\b": "report",
    r"\b(begins?|began|begun|started|made|called) anew\b": "again, or from scratch",
    r"\bbehind (the|an|it|its|every|each|them|so many|\d)\b": "after",
    r"\bis said\b": "is reported",
    r"\b(what|who) is told\b": "is reported",
    r"\bby (itself|themselves)\b": "automatically, or on its own",
    r"\bas ever\b": "as usual",
    r"\bhas lost another one\b": "lost its connection to a peer",
}
"""Phrases that a reader stumbles over, and the ordinary words for them."""
FILES = sorted(PACKAGE.rglob("*.py"))
PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def docstrings(path: Path) -> list[tuple[int, str]]:
    """Docstrings of a file, those under fields and constants included, by line."""
    return [
        (node.lineno, node.value.value.strip())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]


def phrases(text: str) -> list[str]:
    """Banned phrases in a text, with their lines."""
    # Sentences run over line breaks, quotes and comment signs.
    return [
        f"line {text[: found.start()].count(chr(10)) + 1}: {found[0]!r} (write: {better})"
        for pattern, better in BANNED.items()
        for found in re.finditer(pattern.replace(" ", r"[\s\"#f|]+"), text)
    ]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_first_lines_are_noun_phrases_or_imperatives(path):
    found = [f"line {line}: {text[:80]}" for line, text in docstrings(path) if QUESTION.match(text)]
    assert not found, "\n".join([f"{name_of(path)}:", *found])


@pytest.mark.parametrize("path", [*FILES, *PAGES], ids=name_of)
def test_words_are_the_ordinary_ones_of_the_field(path):
    found = phrases(path.read_text(encoding="utf-8"))
    assert not found, "\n".join([f"{name_of(path)}:", *found])


@pytest.mark.parametrize(
    "text",
    [
        "the job goes on from step 3",
        "steps that are told\n    # of",
        'f"training goes "\n        "on"',
        "a pause behind the step",
    ],
)
def test_a_banned_phrase_is_found(text):
    assert phrases(text)
