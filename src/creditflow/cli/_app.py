"""The `creditflow` command in typer: groups whose commands are loaded when called, errors, exit codes."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from creditflow.cli import SUMMARY, CommandEntry, commands, commands_in, find_command, listed, versions
from creditflow.errors import ConfigError, CreditflowError, InputError, did_you_mean, printable, says_disk_full
from creditflow.registry import load_point

_UsageError: type[Any] = typer.BadParameter.__mro__[1]
"""The error of an unknown option or a missing argument, which typer exports under no name."""


class Command(TyperCommand):
    """A command whose help has no Python types."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.translate({ord("{"): None, ord("}"): None}) for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for kind in ("argument", "option"):
            records = (p.get_help_record(ctx) for p in self.get_params(ctx) if p.param_type_name == kind)
            if rows := [(re.sub(" <.*>", "", record[0]), record[1]) for record in records if record]:
                with formatter.section(f"{kind.capitalize()}s"):
                    formatter.write_dl(rows)


@contextmanager
def _errors_in_lines() -> Iterator[None]:
    try:
        try:
            yield
        except _UsageError as error:
            raise _in_own_words(error) from error
        except OSError as error:
            if not says_disk_full(error):
                raise
            file = f": {error.filename}" if error.filename else ""
            raise CreditflowError(f"the disk is full{file}; finished files are whole") from error
    except CreditflowError as error:
        lines = [" ".join(text.split()) for text in (str(error), *getattr(error, "__notes__", ()))]
        print("error:", printable("\n  ".join(lines)), file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, InputError) else 1) from error
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise typer.Exit(130) from None


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
            formatter.write_dl([(name, self.entries[name].summary()[0]) for name in self.list_commands(ctx)])

    make_context = _errors_in_lines()(TyperGroup.make_context)
    invoke = _errors_in_lines()(TyperGroup.invoke)


class RootGroup(CommandGroup):
    """The `creditflow` command: this package's commands and those of other distributions."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.entries = commands()

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        formatter.write("\n".join([*listed(self.entries), ""]))


def _load(entry: CommandEntry, name: str) -> Any:
    """Import a command, or make a group. Raises CreditflowError if the module of an entry point cannot be imported."""
    if entry.point is not None:
        return _load_external(entry.point, entry.origin, name)
    module = import_module(entry.module)
    if entry.function:
        return _make_command(getattr(module, entry.function), entry.function)
    group = CommandGroup(name=name, help=entry.summary()[0], no_args_is_help=True, rich_markup_mode=None)
    group.entries = commands_in(Path(*module.__path__), entry.module)
    return group


def _in_own_words(error: Any) -> Exception:
    """An error of typer as an `InputError`; the error itself if it shows the help of a group."""
    if "\n" in error.message:
        return cast(Exception, error)
    see = f"; see `{error.ctx.command_path} --help`" if error.ctx else ""
    if (param := getattr(error, "param", None)) is not None:
        subject = param.opts[0] if param.opts[0].startswith("-") else param.metavar or param.name
        return InputError(f"{subject}: {error.message.rstrip('.') or f'is missing{see}'}")
    options = [word for param in (error.ctx.command.params if error.ctx else ()) for word in param.opts]
    unknown = getattr(error, "option_name", None)
    if options and unknown not in (None, *options):
        return InputError(f"unknown option {unknown}{did_you_mean(unknown, options) or see}")
    return InputError(f"{error.message.rstrip('.')}{see}")


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
    """The command of a function. Its module may define `CommandClass`, a subclass of `Command`."""
    cls = getattr(sys.modules[function.__module__], "CommandClass", Command)
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
