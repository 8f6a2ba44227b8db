"""Registries: the extensions of one kind by name, and the one way to add them.

The modules of a package add the built-in entries: by a decorator, or by a constant of a fixed name. Plug-ins and other
distributions declare an entry point: its name is the entry's, its value the entry, the function or class that declares
it, or the module that does. It is loaded when its name is used, so a broken one matters only there. `items` loads all
of a group, and leaves out the broken ones with a warning. Of two entry points of one name, creditflow's own is used; if
both are of other distributions, an error names them when the name is used.

Entries of files beside a recipe are registered by their caller under a reference, the absolute path and the name:
`/project/rules.py:mine`. Files of one name in two folders therefore have two entries.
"""

from __future__ import annotations

import inspect
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from types import ModuleType
from typing import Any, Generic, TypeGuard, TypeVar, cast

from creditflow.errors import USER_MODULE, ConfigError, did_you_mean
from creditflow.removed import removed_hint

Entry = TypeVar("Entry")


class Registry(Generic[Entry]):
    """A mapping from name to entry. Its error for an unknown name lists the known ones."""

    def __init__(
        self,
        key: str,
        package: str = "",
        group: str = "",
        *,
        constant: str = "",
        decorator: str = "",
        record: type[Entry] | None = None,
        kind: Any = None,
    ) -> None:
        """`key`: the option that selects an entry, for error messages.

        `package`: its modules are the built-in entries: importing them registers entries, or, with `constant`, each
        defines that constant, named by its attribute `name` or else by its module. `group`: entry points. `decorator`:
        the name of the decorator that calls `declare`. `record`: the type of the entries if they are records, None if
        they are the decorated objects. `kind`: the type of entries that no decorator declares.
        """
        self.key, self.record = key, record
        self._package, self._group, self._constant = package, group, constant
        self._decorator, self._kind = decorator, kind or record
        self._entries: dict[str, Entry] = {}
        self._declared: list[tuple[object, Entry]] = []
        """Every decorated object with its entry."""
        self._of_files: dict[str, Entry] = {}
        """Entries of files, by reference."""
        self._recorded: dict[str, Entry] = {}
        """Entries of files that a run has recorded, by reference."""
        self._lazy: dict[str, EntryPoint] = {}
        self._resolved: set[str] = set()
        """Names of entries that no unloaded entry point has."""
        self._is_complete = not package

    def add(self, name: str, entry: Entry) -> None:
        """Add an entry. Raises ConfigError for a taken name: runs under two rules of one name are not comparable."""
        self._complete()
        if name in self._entries:
            raise ConfigError(f"{self.key}: expected a new name, got {name!r}, which is registered already")
        self._entries[name] = entry

    def add_lazily(self, name: str, reference: str) -> None:
        """Add an entry that is imported when its name is used: `package.module:object`."""
        self._lazy[name] = EntryPoint(name, reference, self._group)

    def declare(self, name: str, entry: Entry, decorated: object) -> None:
        """Add the entry that a decorated object declares.

        The name of an object in a file beside a recipe stays free: its reference names it.
        """
        if not str(getattr(decorated, "__module__", "")).startswith(USER_MODULE):
            self.add(name, entry)
        self._declared.append((decorated, entry))

    def declaration(self, value: object) -> Entry | None:
        """The entry behind a value: the value if it is a record or of the kind, else the one it declares, or None."""
        if self._kind is not None and isinstance(value, self._kind):
            return cast(Entry, value)
        return next((entry for decorated, entry in reversed(self._declared) if decorated is value), None)

    def declared_by(self, value: object) -> Entry:
        """The entry of a decorated object or of a record. Raises ConfigError for any other object."""
        if (entry := self.declaration(value)) is not None:
            return entry
        record = f", or a {self.record.__name__}" if self.record is not None else ""
        name = getattr(value, "__name__", repr(value))
        raise ConfigError(
            f"expected a {'function' if record else 'class'} with @{self._decorator}{record}, got "
            f"{type(value).__name__} {name}"
        )

    def load(self, reference: str, entry: Entry) -> None:
        """Register an entry of a file; it replaces that of an earlier load."""
        self._of_files[reference] = entry

    def recall(self, reference: str, entry: Entry) -> None:
        """Register an entry that a run has recorded. It is in force only while the file is not loaded."""
        self._recorded[reference] = entry

    def names(self) -> tuple[str, ...]:
        """The registered names, sorted, without those of files. Loads no entry point."""
        self._complete()
        return tuple(sorted({*self._entries, *self._points()}))

    def loaded(self) -> dict[str, Entry]:
        """The built-in entries, and those of entry points that have been used, by name."""
        self._complete()
        return dict(self._entries)

    def items(self) -> Iterator[tuple[str, Entry]]:
        """The entries by name, sorted, without those of files. One that cannot be loaded is left out with a warning."""
        for name in self.names():
            try:
                entry = self[name]
            except ConfigError as error:
                warnings.warn(f"{error}; it is left out", stacklevel=2)
            else:
                yield name, entry

    def __getitem__(self, name: str) -> Entry:
        """The entry of a name or reference.

        Raises ConfigError, with the known names, for an unknown one, and for an entry point that cannot be loaded, has
        the name of another entry, or names something else.
        """
        self._complete()
        if isinstance(name, str):
            self._resolve(name)
            for entries in (self._entries, self._of_files, self._recorded):
                if name in entries:
                    return entries[name]
        names, of_file = ", ".join(self.names()), ", or FILE.py:NAME" if self._decorator else ""
        raise ConfigError(f"{self.key}: expected one of {names}{of_file}, got {name!r}{self.hint(name)}")

    def __contains__(self, name: object) -> bool:
        self._complete()
        return isinstance(name, str) and (
            any(name in names for names in (self._entries, self._of_files, self._recorded)) or name in self._points()
        )

    def hint(self, name: object) -> str:
        """The end of an error message for an unknown name: its replacement, or the nearest one."""
        if is_file_reference(name):
            return "; a file is loaded with the recipe that names it"
        return removed_hint(self.key, name) or did_you_mean(name, self.names())

    def _complete(self) -> None:
        if self._is_complete:
            return
        self._is_complete = True  # first, because the modules may read the registry while they are imported
        for module in modules_in(self._package) if self._package else ():
            if self._constant:
                entry = getattr(module, self._constant)
                self._entries.setdefault(getattr(entry, "name", module.__name__.rpartition(".")[2]), entry)

    def _points(self) -> dict[str, EntryPoint]:
        return (installed(self._group) if self._group else {}) | self._lazy

    def _resolve(self, name: str) -> None:
        """Load the entry point of a name, if there is one and it was not loaded yet."""
        if name in self._resolved or is_file_reference(name):
            return
        if (point := self._points().get(name)) is not None:
            where = f"entry point {name!r} of {self._group}"
            loaded = load_point(point)  # a module registers all its entries when it is first imported
            if (entry := self.declaration(loaded)) is None and (entry := self._of_package(point, name)) is None:
                kind = f"an object of type {self._kind.__name__}" if self._kind else f"a declaration of {name!r}"
                raise ConfigError(f"{where}: expected {kind}, got {type(loaded).__name__}")
            if self._entries.setdefault(name, entry) is not entry:
                raise ConfigError(f"{where}: expected a new name, got {name!r}, which is taken")
        if name in self._entries:
            self._resolved.add(name)

    def _of_package(self, point: EntryPoint, name: str) -> Entry | None:
        """The entry that the package of `point` declares under a name."""
        package, entry = point.module.partition(".")[0], self._entries.get(name)
        packages = (decorated.__module__.partition(".")[0] for decorated, own in self._declared if own is entry)
        return entry if package in packages else None


def modules_in(package: str) -> Iterator[ModuleType]:
    """Import the modules of a package, in the order of their names."""
    for module in pkgutil.iter_modules(import_module(package).__path__):
        yield import_module(f"{package}.{module.name}")


def installed(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group by name, creditflow's own before others of the same name; none is loaded."""
    points = _search(tuple(sys.path)).select(group=group)
    return {point.name: point for point in sorted(points, key=_is_own)}


@cache
def _search(path: tuple[str, ...]) -> EntryPoints:
    """All entry points of the distributions on `sys.path`, searched once: a recipe needs those of twelve groups."""
    return cast(EntryPoints, entry_points())  # a mapping by group before Python 3.12, with the same `select`


def _is_own(point: EntryPoint) -> bool:
    return point.dist is None or point.dist.name == "creditflow"


def load_point(point: EntryPoint) -> Any:
    """The object that an entry point names. Raises ConfigError if its import fails, or if two have its name."""
    values = sorted({other.value for other in _search(tuple(sys.path)).select(group=point.group, name=point.name)})
    if len(values) > 1 and not _is_own(point):
        raise ConfigError(f"entry points {point.group}: expected one named {point.name!r}, got {' and '.join(values)}")
    try:
        return point.load()
    except Exception as error:  # the module is another distribution's
        raise ConfigError(
            f"entry point {point.name!r} of {point.group}: {point.value} cannot be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error


def is_file_reference(value: object) -> TypeGuard[str]:
    """Whether an option names an entry by its file: `file.py:name`."""
    return isinstance(value, str) and ".py:" in value


def expect_keywords(name: str, entry: Callable[..., Any], options: Mapping[str, Any], key: str, first: int = 0) -> None:
    """Check that `options` are valid keywords of `entry`, apart from its `first` positional parameters.

    Raises ConfigError for an unknown or a missing keyword. `name` (the entry's) and `key` (the option that holds
    `options`) appear in the message.
    """
    parameters = list(inspect.signature(entry).parameters.values())[first:]
    keywords = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
    for word in options:
        if word not in keywords and len(keywords) == len(parameters):
            hint = did_you_mean(str(word), keywords)
            raise ConfigError(f"{key}: expected keys of kind {name}: {', '.join(keywords)}; got {word!r}{hint}")
    for p in parameters:
        if p.kind is not p.VAR_KEYWORD and p.default is p.empty and p.name not in options:
            raise ConfigError(f"{key}.{p.name}: expected a value, which kind {name} needs, got none")
