"""The command line: finds the commands, and turns errors into messages and exit codes.

A module of this package is a command: `why.py` defines `creditflow why`. The function of the same name is its body, the
parameters are its options, and the docstring is its help. A folder is a group of commands: `sandbox/check.py` defines
`creditflow sandbox check`. Names that begin with an underscore are skipped. Plug-ins and other distributions add
commands by entry points of group `creditflow.commands`; each names a function. A module is imported when its command or
its help is called.

Exit codes: 0 success; 1 failure; 2 wrong input; 130 interrupted.
"""

from __future__ import annotations

import ast
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from creditflow._utils.processes import end_with_parent
from creditflow.errors import ConfigError, CreditflowError, InputError, did_you_mean, says_disk_full
from creditflow.registry import installed, load_point
from creditflow.removed import removed_hint

ENTRY_POINTS = "creditflow.commands"
"""The entry point group of commands from other distributions."""


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """A command or group that is not loaded yet."""

    summarize: Callable[[], str]
    """Returns its line in the list of commands."""
    load: Callable[[], Any]
    """Returns the command. Raises CreditflowError if its module cannot be imported."""


class CommandGroup(TyperGroup):
    """A group of commands that are loaded when called.

    It turns a `CreditflowError` or a full disk into one line and an exit code. Other errors keep their traceback.
    """

    entries: dict[str, CommandEntry]

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(self.entries)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.entries:
            close = removed_hint(f"{ctx.command_path} {cmd_name}") or did_you_mean(cmd_name, self.entries)
            raise InputError(f"unknown command {cmd_name!r}{close or f'; `{ctx.command_path} --help` lists them'}")
        return self.entries[cmd_name].load()

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.entries[name].summarize()) for name in self.list_commands(ctx)])

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CreditflowError as error:
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
            raise typer.Exit(2 if isinstance(error, InputError) else 1) from error
        except OSError as error:
            if not says_disk_full(error):
                raise
            file = f": {error.filename}" if error.filename else ""
            print(f"error: the disk is full{file}; finished files are whole", file=sys.stderr)
            raise typer.Exit(1) from error
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(130) from None


class RootGroup(CommandGroup):
    """The `creditflow` command: this package's commands and those of other distributions."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        external = {name: _external_command(point) for name, point in installed(ENTRY_POINTS).items()}
        self.entries = external | _commands_in(Path(__file__).parent, __name__)


def _commands_in(folder: Path, package: str) -> dict[str, CommandEntry]:
    """The commands and groups in a folder, by name. Nothing is imported."""
    entries: dict[str, CommandEntry] = {}
    for path in folder.iterdir():
        name = path.stem.replace("_", "-")
        if path.name.startswith("_"):
            continue
        if path.suffix == ".py":
            entries[name] = _module_entry(path, f"{package}.{path.stem}")
        elif (path / "__init__.py").is_file():
            entries[name] = _group_entry(path, f"{package}.{path.name}")
    return entries


def _module_entry(file: Path, module: str) -> CommandEntry:
    """The command of a module: its function of the same name."""

    def load() -> Any:
        return _make_command(getattr(import_module(module), file.stem), file.stem)

    return CommandEntry(lambda: _summary(file, file.stem), load)


def _group_entry(folder: Path, package: str) -> CommandEntry:
    """The group of the commands in a folder."""

    def summarize() -> str:
        return _first_line(ast.parse((folder / "__init__.py").read_bytes()))

    def load() -> CommandGroup:
        group = CommandGroup(name=folder.name, help=summarize(), no_args_is_help=True, rich_markup_mode=None)
        group.entries = _commands_in(folder, package)
        return group

    return CommandEntry(summarize, load)


def _summary(file: Path, name: str) -> str:
    """The first line of the docstring of a module's function. The module is read, not imported."""
    functions = (node for node in ast.parse(file.read_bytes()).body if isinstance(node, ast.FunctionDef))
    return next((_first_line(node) for node in functions if node.name == name), "")


def _first_line(node: ast.Module | ast.FunctionDef) -> str:
    return (ast.get_docstring(node) or "").partition("\n")[0]


def _external_command(point: metadata.EntryPoint) -> CommandEntry:
    origin = f"{point.dist.name} {point.dist.version}" if point.dist else point.value

    def load_command() -> Any:
        try:
            function = load_point(point)
            if not callable(function):
                raise ConfigError(f"{point.value}: expected a function, got {type(function).__name__}")
            return _make_command(function, point.name)
        except Exception as error:  # whatever a foreign module raises breaks only its own command
            reason = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            raise CreditflowError(f"command {point.name!r} of {origin}: {reason}") from error

    def summarize() -> str:
        package, *path = point.module.split(".")
        spec = find_spec(package)  # of the outermost package, which imports nothing
        folders = (spec.submodule_search_locations or ()) if spec and path else ()
        files = [Path(folder, *path).with_suffix(".py") for folder in folders]
        if spec and spec.origin and not path:
            files = [Path(spec.origin)]
        return next((_summary(file, point.attr) for file in files if file.is_file()), "") or f"(from {origin})"

    return CommandEntry(summarize, load_command)


def _make_command(function: Callable[..., Any], name: str) -> Any:
    """The command of a function. Its module may define `CommandClass`, a subclass of `TyperCommand`."""
    cls = getattr(sys.modules[function.__module__], "CommandClass", TyperCommand)
    holder = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    holder.command(name.replace("_", "-"), cls=cls)(function)
    return typer.main.get_command(holder)


app = typer.Typer(
    name="creditflow",
    cls=RootGroup,
    context_settings={"max_content_width": 120},
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(no_args_is_help=True)
def creditflow(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the versions and exit.",
            callback=lambda show: _print_versions(show=show),
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Train teams of LLM agents, and decide for every step of every agent how much of the reward it earned."""


def _print_versions(*, show: bool) -> None:
    """Print the versions of creditflow, Python, torch and verl, without importing the packages."""
    if not show:
        return
    lines = [f"creditflow {metadata.version('creditflow')}", f"Python {platform.python_version()}"]
    for name in ("torch", "verl"):
        try:
            lines.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            lines.append(f"{name} is not installed")
    print("\n".join(lines))
    raise typer.Exit


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
    if sys.argv[1:2] == ["why"]:
        sys.meta_path.insert(0, _WithoutPandas())
    app(prog_name="creditflow")
