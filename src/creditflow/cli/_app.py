"""The `creditflow` command in typer: groups whose commands are loaded when called, errors, exit codes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from creditflow.cli import SUMMARY, CommandEntry, commands, commands_in, find_command, versions
from creditflow.errors import ConfigError, CreditflowError, InputError, says_disk_full
from creditflow.registry import load_point


class CommandGroup(TyperGroup):
    """A group of commands that are loaded when called.

    It turns a `CreditflowError` or a full disk into a line, with one more for each note of the error, and an exit code.
    Other errors keep their traceback.
    """

    entries: dict[str, CommandEntry]

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(self.entries)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _load(find_command(self.entries, cmd_name, ctx.command_path), cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.entries[name].summary()) for name in self.list_commands(ctx)])

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CreditflowError as error:
            lines = [" ".join(text.split()) for text in (str(error), *getattr(error, "__notes__", ()))]
            print("error:", "\n  ".join(lines), file=sys.stderr)
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
        self.entries = commands()


def _load(entry: CommandEntry, name: str) -> Any:
    """Import a command, or make a group. Raises CreditflowError if the module of an entry point cannot be imported."""
    if entry.point is not None:
        return _load_external(entry.point, entry.origin, name)
    module = import_module(entry.module)
    if entry.function:
        return _make_command(getattr(module, entry.function), entry.function)
    group = CommandGroup(name=name, help=entry.summary(), no_args_is_help=True, rich_markup_mode=None)
    group.entries = commands_in(Path(*module.__path__), entry.module)
    return group


def _load_external(point: EntryPoint, origin: str, name: str) -> Any:
    try:
        function = load_point(point)
        if not callable(function):
            raise ConfigError(f"{point.value}: expected a function, got {type(function).__name__}")
        return _make_command(function, name)
    except Exception as error:  # whatever a foreign module raises breaks only its own command
        reason = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        raise CreditflowError(f"command {name!r} of {origin}: {reason}") from error


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


def _show_versions(show: bool) -> None:
    if show:
        print(versions())
        raise typer.Exit


@app.callback(no_args_is_help=True, help=SUMMARY)
def creditflow(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the versions and exit.", callback=_show_versions, is_eager=True),
    ] = False,
) -> None:
    """The options of `creditflow` itself."""
