"""Loads the user's functions: `package.module:name`, or `file.py:name` relative to the recipe.

Loading imports the module, so it runs the Python code that a recipe names. The Python files of one folder are modules
of one package, so files of one name in two folders are two modules. The package is named after their texts:
an edited file makes a new package, and functions loaded earlier keep the earlier files.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.abc
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from creditflow._utils.tracebacks import located
from creditflow.errors import USER_MODULE, ConfigError, CreditflowError, did_you_mean, first_line
from creditflow.removed import removed_hint

USER_FILES: dict[str, tuple[str, bytes]] = {}
"""The Python files of the users' folders that this process loads from: module name -> path and text.

Another process that updates its table with this one can import them under the same names."""
_NEVER_REPLACED = sys.stdlib_module_names | {"creditflow"}


def load_object(reference: str, base: Path, key: str) -> Any:
    """Import and return the object that `reference` names.

    A relative file is looked up in `base` (the recipe's folder), then in the working directory. `key`: the option that
    holds the reference, for error messages. Raises ConfigError if the module, the file or the name does not exist or
    cannot be loaded.
    """
    where, colon, name = reference.rpartition(":")
    if not colon or not where or not name:
        raise ConfigError(f"{key}: expected `package.module:function` or `file.py:function`, got {reference!r}")
    module = _import(where, base, key)
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


def _import(where: str, base: Path, key: str) -> ModuleType:
    """Import an installed module, or a file of a recipe."""
    name, package, path = where, "", _find(where, base)
    if where.endswith(".py"):
        if path is None:
            elsewhere = "" if base.resolve() == Path.cwd() else " or the working directory"
            raise ConfigError(f"{key}: no file {where!r} in {base}{elsewhere}")
        name = _module_name(path)
        package = name.partition(".")[0]
    elif not all(part.isidentifier() for part in where.split(".")):
        raise ConfigError(f"{key}: {where!r} is no module's name")
    try:
        return importlib.import_module(name)
    except BaseException as error:
        for module in [module for module in sys.modules if module.partition(".")[0] == package]:
            del sys.modules[module]  # its neighbours hold the half-loaded module
        if isinstance(error, CreditflowError | KeyboardInterrupt):
            raise
        raise ConfigError(f"{key}: {_import_failure(error, str(path or where), package)}") from error


def _import_failure(error: BaseException, place: str, package: str = "") -> str:
    """Describe a failed import. `package`: that of the user's folder, if the import began in one of its files."""
    if isinstance(error, SyntaxError):
        return f"{error.filename or place}:{error.lineno or 1}: {error.msg}"
    if not isinstance(error, ImportError):
        return located(error, f"{type(error).__name__}: {first_line(error)}")
    name, hint = (error.name or "").removeprefix(f"{package}."), ""
    text = str(error).replace(f"{package}.", "").replace(package, ".") if package else str(error)
    if isinstance(error, ModuleNotFoundError):
        text = f"no module {name!r}"
        hint = f"; a recipe's file can import what is installed, and the Python files in {Path(place).parent}"
    elif name in _NEVER_REPLACED and f"{package}.{name}" in USER_FILES:
        hint = f"; {name}.py beside it never replaces the installed {name}: rename the file"
    return located(error, text) + (removed_hint(name) or (hint if package else ""))


def _module_name(path: Path) -> str:
    """Read the Python files of a file's folder, and return the file's module name."""
    target = path.resolve()
    path = target if target.suffix == ".py" else path.parent.resolve() / path.name
    files = [file for file in sorted(path.parent.glob("*.py")) if file.is_file() and os.access(file, os.R_OK)]
    texts = {str(file): file.read_bytes() for file in files}
    package = f"{USER_MODULE}{hashlib.sha256(repr(texts).encode()).hexdigest()[:8]}"
    names = {file: f"{package}.{file.stem.replace('.', '-')}" for file in (*files, path)}  # a dot would name a package
    USER_FILES.update({names[file]: (str(file), texts[str(file)]) for file in files})
    return names[path]


class _UserFiles(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports users' files from their text, as another machine may not have them on disk."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname.startswith(USER_MODULE) and "." not in fullname:
            return ModuleSpec(fullname, None, is_package=True)
        if fullname not in USER_FILES:
            return None
        spec = ModuleSpec(fullname, self, origin=USER_FILES[fullname][0])
        spec.has_location = True  # sets __file__: a recipe may open files beside it
        return spec

    def get_source(self, fullname: str) -> str:
        return importlib.util.decode_source(USER_FILES[fullname][1])

    def get_code(self, fullname: str) -> Any:
        path, text = USER_FILES[fullname]
        tree = ast.parse(text, path)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not node.level:
                node.module = _beside(node.module, fullname)
            for alias in node.names if isinstance(node, ast.Import) else ():
                if (module := _beside(alias.name, fullname)) != alias.name:
                    alias.name, alias.asname = module, alias.asname or alias.name
        return compile(tree, path, "exec", dont_inherit=True)


def _beside(name: Any, importer: str) -> Any:
    """The full name of a module: files beside the importer come before installed modules, as for a script."""
    module = f"{importer.partition('.')[0]}.{name}"
    return module if module in USER_FILES and module != importer and name not in _NEVER_REPLACED else name


sys.meta_path.append(_UserFiles())
