"""The command line: finds the commands, and turns errors into messages and exit codes.

A module of this package is a command: `why.py` defines `creditflow why`. The function of the same name is its body, the
parameters are its options, and the docstring is its help. A folder is a group of commands: `sandbox/check.py` defines
`creditflow sandbox check`. Names that begin with an underscore are skipped. Plug-ins and other distributions add
commands by entry points of group `creditflow.commands`; each names a function. A module is imported when its command or
its help is called. Its constant `EXTRA` names the extra with the packages that the command needs, `train` by default.
If the docstring ends with `Example: ` and a command line, the list of commands shows it. `SECTIONS` orders that list.

Exit codes: 0 success; 1 failure; 2 wrong input; 130 interrupted.
"""

from __future__ import annotations

import ast
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

from creditflow._utils.install import install_command, missing_package
from creditflow._utils.lazy import attach
from creditflow._utils.processes import end_with_parent
from creditflow.errors import InputError, did_you_mean
from creditflow.registry import installed
from creditflow.removed import removed_hint

if TYPE_CHECKING:
    from creditflow.cli._app import app

__all__ = ["ENTRY_POINTS", "SUMMARY", "app", "main"]
__getattr__ = attach(__name__, {"creditflow.cli._app": ("app",)})

ENTRY_POINTS = "creditflow.commands"
"""The entry point group of commands from other distributions."""
SUMMARY = "Train teams of LLM agents, and decide for every step of every agent how much of the reward it earned."
EXAMPLE = "Example: "
"""The beginning of the last line of a command's docstring, if it is an example."""
SECTIONS = {
    "Begin": ("init", "recipes", "check"),
    "Train": ("train", "eval", "compare"),
    "Understand": ("why", "report", "view", "audit", "recredit"),
    "Use the model": ("serve", "publish"),
    "Prepare": ("model", "data", "convert", "from-verl", "schema", "sandbox"),
}
"""The commands of this distribution in the order of work."""


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """A command or group that is not loaded yet. Its file is read, not imported."""

    module: str
    function: str = ""
    """The command's function; empty for a group."""
    point: metadata.EntryPoint | None = None
    """The entry point that names the command, of a plug-in or another distribution."""

    @property
    def origin(self) -> str:
        """The distribution that the command comes from."""
        dist = self.point and self.point.dist
        return f"{dist.name} {dist.version}" if dist else self.module

    def summary(self) -> tuple[str, str]:
        """The first line of its docstring, and the example that is its last line, if it has one."""
        body = self._tree().body
        functions = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == self.function]
        nodes = functions if self.function else [self._tree()]
        lines = [line for node in nodes for line in (ast.get_docstring(node) or "").splitlines()]
        first, last = (lines[0], lines[-1]) if lines else (f"(from {self.origin})", "")
        return first, last.removeprefix(EXAMPLE) if last.startswith(EXAMPLE) else ""

    def extra(self) -> str:
        """The extra with the packages that the command needs."""
        values = [node.value for node in self._tree().body if isinstance(node, ast.Assign) and _is_extra(node)]
        return next(map(ast.literal_eval, values), "train")

    def _tree(self) -> ast.Module:
        package, *path = self.module.split(".")
        spec = find_spec(package)  # of the outermost package, which imports nothing
        places = [Path(folder, *path) for folder in (spec.submodule_search_locations or ()) if path] if spec else []
        files = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")]
        if spec and spec.origin and not path:
            files = [Path(spec.origin)]
        return ast.parse(next((file.read_bytes() for file in files if file.is_file()), b""))


def _is_extra(node: ast.Assign) -> bool:
    return [ast.unparse(target) for target in node.targets] == ["EXTRA"]


def commands() -> dict[str, CommandEntry]:
    """This package's commands and groups, and those of entry points, by name."""
    points = installed(ENTRY_POINTS)
    external = {name: CommandEntry(point.module, point.attr, point) for name, point in points.items()}
    return external | commands_in(Path(__file__).parent, __name__)


def commands_in(folder: Path, package: str) -> dict[str, CommandEntry]:
    """The commands and groups in a folder, by name. Nothing is imported."""
    paths = [path for path in folder.iterdir() if not path.name.startswith("_")]
    return {
        path.stem.replace("_", "-"): CommandEntry(f"{package}.{path.stem}", path.stem if path.suffix else "")
        for path in paths
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }


def listed(entries: Mapping[str, CommandEntry]) -> Iterator[str]:
    """The lines of the list of commands: a summary of each, and below it its example."""
    others = sorted(set(entries).difference(*SECTIONS.values()))
    for title, names in {**SECTIONS, "Commands of other packages": others}.items():
        yield from ("", f"{title}:") if names else ()
        for name in filter(entries.__contains__, names):
            summary, example = entries[name].summary()
            yield f"  {name:11}{summary}"
            yield from (f"{'':13}{example}",) if example else ()


def find_command(entries: Mapping[str, CommandEntry], name: str, path: str = "creditflow") -> CommandEntry:
    """The command of a name. Raises InputError, with the nearest name, for an unknown one."""
    if name not in entries:
        close = removed_hint(f"{path} {name}") or did_you_mean(name, entries)
        raise InputError(f"unknown command {name!r}{close or f'; `{path} --help` lists them'}")
    return entries[name]


def versions() -> str:
    """The versions of creditflow, Python, torch and verl, without importing the packages."""
    lines = [f"creditflow {metadata.version('creditflow')}", f"Python {platform.python_version()}"]
    for name in ("torch", "verl"):
        try:
            lines.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            lines.append(f"{name} is not installed")
    return "\n".join(lines)


class _WithoutPandas(MetaPathFinder):
    """Import hook that blocks pandas for `why`.

    pyarrow imports an installed pandas for its first array, which would take a third of the command's time. This
    process runs nothing but `why`, which does not use pandas.
    """

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("No module named 'pandas'", name="pandas")


def main() -> None:
    """Run the `creditflow` command."""
    end_with_parent()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names and texts may have characters that it cannot encode
    words = sys.argv[1:]
    if words[:1] == ["why"]:
        sys.meta_path.insert(0, _WithoutPandas())
    try:
        from creditflow.cli._app import app

        app(prog_name="creditflow")
    except ModuleNotFoundError as error:
        if error.name == "typer" and words in ([], ["--help"], ["--version"]):
            print(versions() if words == ["--version"] else _plain_help())
        else:
            print(f"error: {_missing(error, words)}", file=sys.stderr)
            sys.exit(2)


def _plain_help() -> str:
    """The list of commands, made without typer, with the lines that install their packages."""
    head = ["Usage: creditflow [OPTIONS] COMMAND [ARGS]...", "", f"  {SUMMARY}"]
    needed = [f"Reading runs needs {install_command('report')}", f"Training needs {install_command('train')}"]
    return "\n".join([*head, *listed(commands()), "", *needed])


def _missing(error: ModuleNotFoundError, words: list[str]) -> str:
    """The message for a missing package. Raises the error itself unless the extra of the command has that package."""
    try:
        declared = find_command(commands(), words[0]).extra()
    except InputError as unknown:
        return str(unknown)
    return str(missing_package(f"creditflow {words[0]}", error, declared))
