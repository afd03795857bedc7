"""`Patch`: attributes of a user's object, replaced for a while and then given back."""

from __future__ import annotations

from typing import Any, Protocol


class Removable(Protocol):
    """A gate: it replaces methods of a user's object until it is removed."""

    def remove(self) -> None:
        """Gives the object its own methods back."""
        ...


class Patch:
    """Replaces attributes of one object until `remove`.

    They are put on the instance, so that its class, and every other object of it, stays as it is.
    What others put there since then goes, too, when the patch is removed.

    Args:
        target: The object; its attributes are in its `__dict__`.
        attributes: The new values by name.
    """

    def __init__(self, target: object, attributes: dict[str, Any]) -> None:
        self._target = target
        own = vars(target)
        self._before = {name: own[name] for name in attributes if name in own}
        self._names = tuple(attributes)
        own.update(attributes)

    def remove(self) -> None:
        """Gives the object its own attributes back; a second call changes nothing."""
        own = vars(self._target)
        for name in self._names:
            own.pop(name, None)
        own.update(self._before)
        self._names, self._before = (), {}
