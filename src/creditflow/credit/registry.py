"""Registries of named parts that a recipe chooses from: propagation rules, estimators, thresholds.

A registry finds its entries itself: the modules of its package, and the entry points that other distributions declare.
An entry point that cannot be loaded matters only where an entry is missing; the error then names it.

Entries of files beside a recipe are registered by their caller under a reference, the absolute path and the name:
`/project/rules.py:mine`. Files of one name in two folders therefore have two entries.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Generic, TypeGuard, TypeVar

from creditflow.errors import USER_MODULE, ConfigError, did_you_mean
from creditflow.removed import removed_hint

Entry = TypeVar("Entry")


class Registry(Generic[Entry]):
    """A mapping from name to entry. Its error for an unknown name lists the known ones."""

    def __init__(
        self, key: str, package: str = "", group: str = "", decorator: str = "", record: type[Entry] | None = None
    ) -> None:
        """`key`: the option that selects an entry, for error messages.

        `package`: importing its modules registers the built-in entries. `group`: entry points whose modules register
        entries of other distributions. `decorator`: the name of the decorator that calls `declare`. `record`: the type
        of the entries if they are records, None if they are the decorated objects.
        """
        self.key, self._package, self._group, self._decorator, self.record = key, package, group, decorator, record
        self._entries: dict[str, Entry] = {}
        self._declared: list[tuple[object, Entry]] = []
        """Every decorated object with its entry."""
        self._loaded: dict[str, Entry] = {}
        """Entries of files, by reference."""
        self._recorded: dict[str, Entry] = {}
        """Entries of files that a run has recorded, by reference."""
        self._unloadable: list[str] = []
        self._is_complete = not (package or group)

    def add(self, name: str, entry: Entry) -> None:
        """Add an entry. Raises ConfigError for a taken name: runs under two rules of one name are not comparable."""
        self._complete()
        if name in self._entries:
            raise ConfigError(f"{self.key}: expected a new name, got {name!r}, which is registered already")
        self._entries[name] = entry

    def declare(self, name: str, entry: Entry, decorated: object) -> None:
        """Add the entry that a decorated object declares.

        The name of an object in a file beside a recipe stays free: its reference names it.
        """
        if not str(getattr(decorated, "__module__", "")).startswith(USER_MODULE):
            self.add(name, entry)
        self._declared.append((decorated, entry))

    def declaration(self, found: object) -> Entry | None:
        """The entry of a decorated object or of a record; None for any other object."""
        if self.record is not None and isinstance(found, self.record):
            return found
        return next((entry for decorated, entry in reversed(self._declared) if decorated is found), None)

    def declared_by(self, found: object) -> Entry:
        """The entry of a decorated object or of a record. Raises ConfigError for any other object."""
        if (entry := self.declaration(found)) is not None:
            return entry
        record = f", or a {self.record.__name__}" if self.record is not None else ""
        name = getattr(found, "__name__", repr(found))
        raise ConfigError(
            f"expected a {'function' if record else 'class'} with @{self._decorator}{record}, got "
            f"{type(found).__name__} {name}"
        )

    def load(self, reference: str, entry: Entry) -> None:
        """Register an entry of a file; it replaces that of an earlier load."""
        self._loaded[reference] = entry

    def recall(self, reference: str, entry: Entry) -> None:
        """Register an entry that a run has recorded. It is in force only while the file is not loaded."""
        self._recorded[reference] = entry

    def remove(self, name: str) -> None:
        """Remove `name`, for tests and notebooks that register an entry twice."""
        self._entries.pop(name, None)

    def names(self) -> tuple[str, ...]:
        """The registered names, sorted, without those of files."""
        self._complete()
        return tuple(sorted(self._entries))

    def __getitem__(self, name: str) -> Entry:
        """The entry of a name or reference. Raises ConfigError, with the known names, for an unknown one."""
        self._complete()
        for entries in (self._entries, self._loaded, self._recorded) if isinstance(name, str) else ():
            if name in entries:
                return entries[name]
        known = ", ".join(self.names())
        raise ConfigError(f"{self.key}: expected one of {known}, got {name!r}{self.hint(name)}")

    def __contains__(self, name: object) -> bool:
        self._complete()
        return isinstance(name, str) and any(name in e for e in (self._entries, self._loaded, self._recorded))

    def hint(self, name: object) -> str:
        """The end of an error message for an unknown name: the nearest one, and entry points that cannot be loaded."""
        self._complete()
        if is_file_reference(name):
            return "; a file is loaded with the recipe that names it"
        if removed := removed_hint(self.key, name):
            return removed
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


def is_file_reference(value: object) -> TypeGuard[str]:
    """Whether an option names an entry by its file: `file.py:name`."""
    return isinstance(value, str) and ".py:" in value


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
