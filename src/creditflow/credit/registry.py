"""Registries of named parts that a recipe chooses from: propagation rules, estimators, thresholds.

A registry finds its entries itself: the modules of its package, and the entry points that other distributions declare.
An entry point that cannot be loaded matters only where an entry is missing; the error then names it.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from creditflow.errors import ConfigError, did_you_mean

Entry = TypeVar("Entry")


class Registry(Generic[Entry]):
    """A mapping from name to entry. Its error for an unknown name lists the known ones."""

    def __init__(self, key: str, package: str = "", group: str = "") -> None:
        """`key`: the option that selects an entry, for error messages.

        `package`: importing its modules registers the built-in entries. `group`: entry points whose modules register
        entries of other distributions.
        """
        self.key, self._package, self._group = key, package, group
        self._entries: dict[str, Entry] = {}
        self._unloadable: list[str] = []
        self._is_complete = not (package or group)

    def add(self, name: str, entry: Entry) -> None:
        """Add an entry. Raises ConfigError for a taken name: runs under two rules of one name are not comparable."""
        self._complete()
        if name in self._entries:
            raise ConfigError(f"{self.key}: expected a new name, got {name!r}, which is registered already")
        self._entries[name] = entry

    def remove(self, name: str) -> None:
        """Remove `name`, for tests and notebooks that register an entry twice."""
        self._entries.pop(name, None)

    def names(self) -> tuple[str, ...]:
        """The registered names, sorted."""
        self._complete()
        return tuple(sorted(self._entries))

    def __getitem__(self, name: str) -> Entry:
        """The entry of `name`. Raises ConfigError, with the known names, for an unknown one."""
        self._complete()
        try:
            return self._entries[name]
        except (KeyError, TypeError):  # an unhashable name is unknown, too
            known = ", ".join(self.names())
            raise ConfigError(f"{self.key}: expected one of {known}, got {name!r}{self.hint(name)}") from None

    def hint(self, name: object) -> str:
        """The end of an error message for an unknown name: the nearest one, and entry points that cannot be loaded."""
        self._complete()
        return did_you_mean(name, self._entries) + "".join(f"; {reason}" for reason in self._unloadable)

    def _complete(self) -> None:
        if self._is_complete:
            return
        self._is_complete = True  # first, because the modules may read the registry while they are imported
        if self._package:
            for module in pkgutil.iter_modules(import_module(self._package).__path__):
                import_module(f"{self._package}.{module.name}")
        for point in entry_points(group=self._group) if self._group else ():
            try:
                point.load()
            except Exception as error:  # whatever a foreign module raises
                reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
                self._unloadable.append(f"entry point {point.name} of {self._group} cannot be loaded: {reason}")


def expect_keywords(name: str, entry: Callable[..., Any], options: Mapping[str, Any], key: str, first: int = 0) -> None:
    """Check that `options` are valid keywords of `entry`, apart from its `first` positional parameters.

    Raises ConfigError for an unknown or a missing keyword. `name` (the entry's) and `key` (the option that holds
    `options`) appear in the message.
    """
    parameters = list(inspect.signature(entry).parameters.values())[first:]
    known = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
    for word in options:
        if word not in known and len(known) == len(parameters):
            hint = did_you_mean(str(word), known)
            raise ConfigError(f"{key}: expected keys of kind {name}: {', '.join(known)}; got {word!r}{hint}")
    for p in parameters:
        if p.kind is not p.VAR_KEYWORD and p.default is p.empty and p.name not in options:
            raise ConfigError(f"{key}.{p.name}: expected a value, which kind {name} needs, got none")
