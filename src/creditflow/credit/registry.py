"""Names for the parts that a recipe chooses between: propagation rules, advantage estimators.

A registry knows names and what stands behind them, not what it computes. The project's own rules enter by the same
door as a user's.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from creditflow.errors import ConfigError

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
            raise ConfigError(f"{self.key}: expected one of {', '.join(self._entries)}, got {name!r}") from None
