"""Loads propagation rules, estimators and thresholds from files: `algorithm.propagation: rules.py:mine`.

The options then hold the absolute path. It names the entry in the registries, and a run records it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from creditflow._utils.loading import absolute_reference, load_object
from creditflow._utils.tracebacks import at_users_line, located
from creditflow.config.references import change_references
from creditflow.errors import ConfigError, CreditflowError
from creditflow.registry import Registry


def load_named_files(options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Options with absolute references, after everything that they name by file is loaded and registered.

    A relative file is looked up in `folder`, then in the working directory. Loading runs the file. Raises ConfigError,
    with the key and the reference, if that fails.
    """

    def load(registry: Registry[Any], key: str, reference: str) -> str:
        full = absolute_reference(reference, folder)
        entry = _entry(registry, key, reference, full, folder)
        name = f"{registry.key}: {full}"
        function = fields(registry.record)[0].name if registry.record is not None else None
        if function is not None:
            entry = replace(entry, **{function: _located(getattr(entry, function), name)})
        elif isinstance(entry, type):
            methods = {part: _located(getattr(entry, part), name) for part in _CALLED if hasattr(entry, part)}
            entry = type(entry.__name__, (entry,), {"name": full, "__doc__": entry.__doc__, **methods})
        else:
            entry = _located(entry, name)
        registry.load(full, entry)
        return full

    return change_references(options, load)


_OF_THRESHOLDS = ("__init__", "theta", "update", "metrics", "state_dict", "load_state_dict")
_CALLED = ("credit", "fit", "make_threshold", "formulas", *_OF_THRESHOLDS)
"""The methods of rules and thresholds that other code calls."""


def _entry(registry: Registry[Any], key: str, reference: str, full: str, folder: Path) -> Any:
    try:
        return registry.declared_by(load_object(full, folder, key))
    except CreditflowError as error:
        reason = located(error, str(error).removeprefix(f"{key}: "))
        raise ConfigError(f"{key}: {reference}: cannot be loaded: {reason}") from error


def _located(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`function`, whose exceptions become ConfigErrors with the line in the user's file."""

    @functools.wraps(function, updated=())
    def run(*arguments: Any, **keywords: Any) -> Any:
        try:
            return function(*arguments, **keywords)
        except CreditflowError as error:
            at_users_line(error)
            raise
        except Exception as error:  # whatever the user's function raises
            raise ConfigError(located(error, f"{name}: {type(error).__name__}: {error}")) from error

    return run
