"""Declaration of a foreign name: where it is, why it is needed, and which versions have it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module, metadata
from typing import Any


class MissingNameError(RuntimeError):
    """The installed version of another package lacks a name that resilin needs."""


@dataclass(frozen=True, slots=True, eq=False)
class Package:
    """Another package, and all names declared of it."""

    distribution: str
    """Its name on the package index."""
    tested: tuple[str, ...]
    """Versions that the tests were run with; each of them has every declared name."""
    version: Callable[[], str] | None = None
    """Returns its installed version; None asks the metadata of the distribution."""
    names: list[Name] = field(default_factory=list)
    """All declared names."""

    def name(
        self, path: str, use: str, *, instance: bool = False, since: str = "", until: str = ""
    ) -> Name:
        """Declare a name.

        Args:
            path: Module and attribute, such as `torch.nn:Module._apply`.
            use: Its use in resilin.
            instance: Whether only instances of the class have it, and not the class.
            since: The first version that has it, if the oldest one tested has not.
            until: The first version in which another name takes its place.
        """
        made = Name(self, path, use, instance, since, until)
        self.names.append(made)
        return made

    def installed(self) -> str | None:
        """Its version; None if it is unknown."""
        try:
            return self.version() if self.version else metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return None

    def missing(self, name: str, since: str = "") -> MissingNameError:
        """The error for a name that is gone, in one sentence."""
        has = f"; {self.distribution} {since} has it" if since else ""
        return MissingNameError(
            f"resilin needs {name}, which {self.distribution} "
            f"{self.installed() or '(version unknown)'} does not have{has}; tested with "
            f"{_listed(self.tested)}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Name:
    """One name of another package."""

    package: Package
    """The package that has it."""
    path: str
    """Module and attribute, separated by a colon."""
    use: str
    """Its use in resilin."""
    instance: bool
    """Whether only instances have it."""
    since: str
    """The first version that has it; empty if all tested ones have it, from the oldest on."""
    until: str
    """The first version in which another name takes its place; empty if none does."""

    def __str__(self) -> str:
        return self.path.replace(":", ".")

    @property
    def attribute(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(":")[2].rpartition(".")[2]

    def find(self) -> Any:
        """Import the module and return the named object.

        For a name that only instances have, that is the class: see `of` for the rest.

        Raises:
            MissingNameError: The installed version does not have it.
            ImportError: The module is there, and cannot be imported.
        """
        module, _, attributes = self.path.partition(":")
        parts = attributes.split(".") if attributes else []
        if self.instance:
            parts.pop()
        try:
            found: Any = import_module(module)
        except ModuleNotFoundError as error:
            # It may be there, and something that it needs is not: then this error says more.
            if not f"{module}.".startswith(f"{error.name}."):
                raise
            raise self.package.missing(str(self), self.since) from error
        try:
            for part in parts:
                found = getattr(found, part)
        except AttributeError as error:
            raise self.package.missing(str(self), self.since) from error
        return found

    def of(self, owner: Any) -> Any:
        """The attribute of this name of an object.

        Raises:
            MissingNameError: The object does not have it.
        """
        try:
            return getattr(owner, self.attribute)
        except AttributeError as error:
            raise self._missing_of(owner) from error

    def set(self, owner: Any, value: Any) -> None:
        """Set the attribute of this name of an object, which must have it already.

        Raises:
            MissingNameError: The object does not have it: setting it would have no effect.
        """
        if not hasattr(owner, self.attribute):
            raise self._missing_of(owner)
        setattr(owner, self.attribute, value)

    def _missing_of(self, owner: Any) -> MissingNameError:
        kind = owner if isinstance(owner, type) else type(owner)
        name = f"{kind.__module__}.{kind.__qualname__}.{self.attribute}"
        return self.package.missing(name, self.since)


def _listed(versions: tuple[str, ...]) -> str:
    return " and ".join(filter(None, [", ".join(versions[:-1]), versions[-1]]))
