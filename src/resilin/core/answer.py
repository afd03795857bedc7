"""`Answer`: what a scheduler says to a job that has sent its hints, as JSON.

It is read by the job, which must not fail for whatever a server answers: see `hints_json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from resilin.core import hints_json
from resilin.core.hints_json import MAX_ENTRIES, Fields, HintsError

MAX_SIZE = 10**6
"""Largest size in a menu."""

Menu = Mapping[str, tuple[tuple[int, int], ...]]
"""Sizes on offer: for each kind of accelerator, pairs of a size and its number of hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of a scheduler to the hints of a job."""

    replicas: int | None = None
    """Size that the scheduler wants the job to have; None if it has not decided."""
    menu: Menu = field(default_factory=dict)
    """Sizes that it wants to know the goodput of."""
    leaves: float | None = None
    """Unix time at which a node of the job is taken away; None if none is."""

    def to_json(self) -> dict[str, Any]:
        """A dict that `json.dumps` takes."""
        return {
            "replicas": self.replicas,
            "menu": {kind: [list(pair) for pair in offers] for kind, offers in self.menu.items()},
            "leaves": self.leaves,
        }

    @classmethod
    def from_json(cls, told: Any) -> Answer:
        """Reads what `to_json` returned. Fields that it does not know are ignored.

        Raises:
            HintsError: A field is missing or cannot be what it should be.
        """
        fields = Fields(told, "the answer")
        return cls(
            replicas=fields.optional("replicas", fields.whole),
            menu=read_menu(fields, "menu"),
            leaves=fields.optional("leaves", fields.real),
        )

    @classmethod
    def parse(cls, text: str | bytes) -> Answer:
        """Reads the JSON text of an answer.

        Raises:
            HintsError: As for `from_json`, or the text is too long or not JSON.
        """
        return cls.from_json(hints_json.parse(text, "the answer"))


def read_menu(fields: Fields, path: str) -> Menu:
    """The menu at this path of a JSON object.

    Raises:
        HintsError: It is no menu, or too long.
    """
    menu = {}
    for kind in fields.kinds(path):
        where = f"{path}.{kind}"
        offers = Fields({"menu": fields.get(path)[kind]}, where).entries("menu", _offer)
        if list(offers) != sorted(dict(offers).items()):
            raise HintsError(f"{where} must have ascending sizes, none of them twice")
        menu[kind] = offers
    if sum(map(len, menu.values())) > MAX_ENTRIES:
        raise HintsError(f"{path} must have at most {MAX_ENTRIES} entries, over all kinds")
    return menu


def _offer(path: str, value: Any) -> tuple[int, int]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise HintsError(f"{path} must be a pair [size, hosts]")
    size = hints_json.whole(f"size of {path}", value[0], at_least=1, at_most=MAX_SIZE)
    return size, hints_json.whole(f"hosts of {path}", value[1], at_least=1, at_most=size)
