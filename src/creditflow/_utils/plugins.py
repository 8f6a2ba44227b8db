"""Extensions of one kind: the modules of a package, and the entry points of plug-ins and other distributions."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any

from creditflow.errors import ConfigError


def modules_in(package: str) -> Iterator[ModuleType]:
    """Import the modules of a package, in the order of their names."""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        yield importlib.import_module(f"{package}.{module.name}")


def installed(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group by name; none is loaded. Raises ConfigError for two of one name."""
    points: dict[str, EntryPoint] = {}
    for point in entry_points(group=group):
        if points.setdefault(point.name, point).value != point.value:
            raise ConfigError(
                f"entry points {group}: expected one named {point.name!r}, got {points[point.name].value} "
                f"and {point.value}"
            )
    return points


def load(point: EntryPoint, kind: type | None = None) -> Any:
    """The object that an entry point names. Raises ConfigError if its import fails or it is not of `kind`."""
    key = f"entry point {point.name!r} of {point.group}"
    try:
        loaded = point.load()
    except Exception as error:  # the module is another distribution's
        raise ConfigError(f"{key}: {point.value} cannot be loaded: {type(error).__name__}: {error}") from error
    if kind is not None and not isinstance(loaded, kind):
        raise ConfigError(f"{key}: expected a {kind.__name__}, got {type(loaded).__name__}")
    return loaded
