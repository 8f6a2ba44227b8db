"""Loads the user's functions: `package.module:name`, or `file.py:name` relative to the recipe.

Loading imports the module, so it runs the Python code that a recipe names. Such a file can import the Python files
beside it. They are modules of its folder alone: files of one name in two folders are two modules.
"""

from __future__ import annotations

import builtins
import hashlib
import importlib
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from creditflow.errors import USER_MODULE, ConfigError, did_you_mean
from creditflow.removed import removed_hint

_OFFERED: dict[str, tuple[str, bytes]] = {}
"""The files of `offer_files`."""
_FILES: dict[str, tuple[str, bytes]] = {}
"""The user's files loaded by this process: module name -> path and text."""
_NEIGHBOURS: dict[str, dict[Path, ModuleType]] = {}
"""The files beside a user's module that it has imported, directly or not: module name -> path -> module."""


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
    try:
        return _module_of(path.resolve())
    except SyntaxError as error:
        raise ConfigError(f"{key}: {error.filename or path}:{error.lineno or 1}: {error.msg}") from error
    except ModuleNotFoundError as error:
        hint = "; a recipe's file can import what is installed, and the Python files beside it"
        raise ConfigError(f"{key}: {path}: no module {error.name!r}{removed_hint(error.name or '') or hint}") from error


def _module_of(path: Path) -> ModuleType:
    """The module of a user's file.

    There is one per file and process, so that two references to a file share its state. A file that was edited in the
    meantime (in a notebook session), or that imports such a file, gets a new module.
    """
    text = path.read_bytes()
    name = f"{USER_MODULE}{path.stem}_{hashlib.sha256(str(path).encode() + b' ' + text).hexdigest()[:8]}"
    neighbours = _NEIGHBOURS.get(name, {})
    if name in sys.modules and all(_is_current(file, module) for file, module in neighbours.items()):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    _FILES[name], _NEIGHBOURS[name] = (str(path), text), {}
    try:
        _execute(module, str(path), text)
    except BaseException:
        del sys.modules[name], _FILES[name], _NEIGHBOURS[name]
        raise
    return module


def _is_current(file: Path, module: ModuleType) -> bool:
    return file.is_file() and (str(file), file.read_bytes()) == _FILES.get(module.__name__)


def _execute(module: ModuleType, path: str, text: bytes) -> None:
    """Run the user's own code, which the recipe names."""
    vars(module)["__builtins__"] = {**vars(builtins), "__import__": _import_beside(module.__name__, Path(path))}
    exec(compile(text, path, "exec", dont_inherit=True), vars(module))


def _import_beside(importer: str, own: Path) -> Callable[..., ModuleType]:
    """The `import` of one user's module: files beside it come before installed modules, as for a script.

    Modules of the standard library are never replaced.
    """
    neighbours = _NEIGHBOURS.setdefault(importer, {})

    def import_(name: str, names: Any = None, local: Any = None, parts: Any = (), level: int = 0) -> ModuleType:
        path = (own.parent / f"{name}.py").resolve()
        if not name or level > 1 or path == own or name in sys.stdlib_module_names:
            return __import__(name, names, local, parts, level)
        if path not in neighbours:
            offered = next((module for module, (file, _) in _OFFERED.items() if file == str(path)), None)
            if offered is None and not path.is_file():
                return __import__(name, names, local, parts, level)
            module = importlib.import_module(offered) if offered else _module_of(path)
            neighbours.update({path: module, **_NEIGHBOURS[module.__name__]})
        return neighbours[path]

    return import_


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

    def exec_module(self, module: ModuleType) -> None:
        _execute(module, *self.files[module.__name__])
