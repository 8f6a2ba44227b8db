"""Names for the parts that a recipe chooses between: propagation rules, advantage estimators.

A registry knows names and what stands behind them, not what it computes. The project's own rules enter by the same
door as a user's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from creditflow.errors import ConfigError, did_you_mean

Entry = TypeVar("Entry")


class Registry(Generic[Entry]):
    """A mapping from name to entry that says which names there are when it is asked for another."""

    def __init__(self, key: str) -> None:
        """`key`: the option that chooses among the entries, for messages."""
        self.key = key
        self._entries: dict[str, Entry] = {}

    def add(self, name: str, entry: Entry) -> None:
        """Raises ConfigError where `name` is taken: two rules of one name would make runs incomparable in silence."""
        if name in self._entries:
            raise ConfigError(f"{self.key}: expected a new name, got {name!r}, which is registered already")
        self._entries[name] = entry

    def remove(self, name: str) -> None:
        """Forget `name`, as a test or a notebook that registers twice has to."""
        self._entries.pop(name, None)

    def names(self) -> tuple[str, ...]:
        """In order of registration."""
        return tuple(self._entries)

    def __getitem__(self, name: str) -> Entry:
        """Raises ConfigError, naming what there is, for an unknown name."""
        try:
            return self._entries[name]
        except KeyError:
            hint = did_you_mean(name, self._entries)
            raise ConfigError(f"{self.key}: expected one of {', '.join(self._entries)}, got {name!r}{hint}") from None


def expect_keywords(name: str, entry: Callable[..., Any], options: Mapping[str, Any], key: str, first: int = 0) -> None:
    """Raises ConfigError where `options` are not the keywords that `entry` is called with, after `first` others.

    `name`: of the entry; `key`: the option that holds them; both for the message.
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
