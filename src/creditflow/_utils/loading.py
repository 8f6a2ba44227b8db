"""Loads the user's functions: `package.module:name`, or `file.py:name` relative to the recipe.

Loading imports the module, so it runs the Python code that a recipe names.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from creditflow.errors import USER_MODULE, ConfigError, did_you_mean
from creditflow.removed import removed_hint

_OFFERED: dict[str, tuple[str, bytes]] = {}
"""The files of `offer_files`."""
_FILES: dict[str, tuple[str, bytes]] = {}
"""The user's files loaded by this process: module name -> path and text."""


def load_object(reference: str, base: Path, key: str) -> Any:
    """Import and return the object that `reference` names.

    A relative file is looked up in `base` (the recipe's folder), then in the working directory. `key`: the option that
    holds the reference, for error messages. Raises ConfigError if the module, the file or the name does not exist or
    cannot be loaded.
    """
    where, colon, name = reference.rpartition(":")
    if not colon or not where or not name:
        raise ConfigError(f"{key}: expected `package.module:function` or `file.py:function`, got {reference!r}")
    module = _load_file(where, base, key) if where.endswith(".py") else _import(where, key)
    try:
        return getattr(module, name)
    except AttributeError:
        raise ConfigError(f"{key}: {where} has no {name!r}{did_you_mean(name, vars(module))}") from None


def is_reference(value: object) -> bool:
    """Whether `value` names an object (`file.py:name`, `package.module:name`) rather than a file or a folder."""
    return isinstance(value, str) and ":" in value and not os.path.exists(value)  # noqa: PTH110 (Path raises on long names)


def absolute_reference(reference: str, base: Path) -> str:
    """`file.py:name` with the absolute path of its file; unchanged if the file does not exist."""
    file, _, name = reference.rpartition(":")
    path = _find(file, base)
    return reference if path is None else f"{path.resolve()}:{name}"


def _find(file: str, base: Path) -> Path | None:
    return next((path for path in (base / file, Path(file)) if os.path.isfile(path)), None)  # noqa: PTH113 (as above)


def _import(name: str, key: str) -> Any:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"{key}: {name!r} is no module's name")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{key}: no module {error.name!r}{removed_hint(error.name or name)}") from error
    except SyntaxError as error:
        raise ConfigError(f"{key}: {error.filename or name}:{error.lineno or 1}: {error.msg}") from error


def _load_file(file: str, base: Path, key: str) -> Any:
    path = _find(file, base)
    if path is None:
        elsewhere = "" if base.resolve() == Path.cwd() else " or the working directory"
        raise ConfigError(f"{key}: no file {file!r} in {base}{elsewhere}")
    path = path.resolve()
    text = path.read_bytes()
    # One module per file and process, so that two references to a file share its state. A file that was edited in the
    # meantime (in a notebook session) gets a new module.
    name = f"{USER_MODULE}{path.stem}_{hashlib.sha256(str(path).encode() + b' ' + text).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise ConfigError(f"{key}: {path} cannot be loaded as a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _FILES[name] = (str(path), text)
    try:
        exec(compile(text, path, "exec", dont_inherit=True), vars(module))  # the user's own code, named in the recipe
    except SyntaxError as error:
        del sys.modules[name], _FILES[name]
        raise ConfigError(f"{key}: {error.filename or path}:{error.lineno or 1}: {error.msg}") from error
    except ModuleNotFoundError as error:
        del sys.modules[name], _FILES[name]
        hint = "; a recipe's file can import what is installed, not what lies beside it"
        raise ConfigError(f"{key}: {path}: no module {error.name!r}{removed_hint(error.name or '') or hint}") from error
    except BaseException:
        del _FILES[name]
        del sys.modules[name]
        raise
    return module


def loaded_files() -> dict[str, tuple[str, bytes]]:
    """The user's files loaded by this process or offered to it, as they were: module name -> path and text."""
    return _OFFERED | _FILES


def offer_files(files: Mapping[str, tuple[str, bytes]]) -> None:
    """Make files that another process has loaded importable here and in this process's own workers.

    They keep their module names.
    """
    _OFFERED.update(files)
    sys.meta_path.insert(0, _Offered(files))


class _Offered(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports offered files from their text, as another machine may not have them on disk."""

    def __init__(self, files: Mapping[str, tuple[str, bytes]]) -> None:
        self.files = files

    def find_spec(self, fullname: str, path: object = None, target: ModuleType | None = None) -> Any:
        if fullname not in self.files:
            return None
        spec = importlib.util.spec_from_loader(fullname, self, origin=self.files[fullname][0])
        assert spec is not None
        spec.has_location = True  # sets __file__: a recipe may open files beside it
        return spec

    def get_source(self, fullname: str) -> str:
        return importlib.util.decode_source(self.files[fullname][1])

    def get_code(self, fullname: str) -> Any:
        path, text = self.files[fullname]
        return compile(text, path, "exec", dont_inherit=True)
