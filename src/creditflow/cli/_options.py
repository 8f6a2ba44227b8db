"""Arguments that several commands share."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from creditflow._utils.files import make_folder
from creditflow.errors import ConfigError, InputError

if TYPE_CHECKING:
    from creditflow.config import Config


def number_option(option: str, help: str, low: float, high: float = math.inf, *, of: type = int) -> Any:
    """An option with a number of type `of` from `low` to `high`; the refusal of another value names the option."""
    bounds = f"from {low:g}" + (f" to {high:g}" if high < math.inf else " on")

    def parse(text: Any) -> Any:
        with suppress(ValueError):
            if low <= (value := of(text)) <= high:
                return value
        raise ConfigError(f"{option}: expected a {'whole ' * (of is int)}number {bounds}, got {text}")

    return typer.Option(option, parser=parse, metavar="N", help=f"{help.rstrip('.')} ({bounds}).")


Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="A YAML file, or the name of a shipped recipe.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Recipe options to set, such as data.seed=1.")
]
Host = Annotated[str, typer.Option(metavar="HOST", help="The address to listen on.")]
Port = Annotated[int, number_option("--port", "The port; 0 takes a free one.", 0, 65535)]
AllowRemote = Annotated[bool, typer.Option("--allow-remote", help="Allow a --host that other machines can reach.")]
EngineName = Annotated[
    str, typer.Option("--engine", metavar="NAME", help="local: in this process. verl: on a Ray cluster. Or another.")
]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the numbers to FILE.")]


def make_json_folder(file: Path | None) -> None:
    """Make the folder of the file of `--json`. Raises InputError if that fails, or if the file is a folder."""
    if file is not None:
        if file.is_dir():
            raise InputError(f"--json: {file} is a folder")
        make_folder(file.parent, "--json")


def make_new_folder(path: Path, key: str) -> None:
    """Make the folder that the option `key` names. Raises InputError if that fails, or if it has files."""
    make_folder(path, key)
    if any(path.iterdir()):
        raise InputError(f"{key}: {path} is not empty; name a new folder, or empty this one first")


def credit_lines(config: Config) -> Iterator[str]:
    """The preset, and the rule with its options, the estimator, the groups, and the options that are no defaults."""
    from creditflow.config.presets import preset_text
    from creditflow.config.references import spelled_out
    from creditflow.credit import CreditOptions
    from creditflow.reports.text import in_yaml

    if (preset := config.algorithm.preset) is not None:
        yield preset_text(preset)
    options, defaults = spelled_out(config.credit), spelled_out(CreditOptions())
    rule, estimator, groups = (options.pop(key) for key in ("propagation", "adv_estimator", "group_by"))
    others = [f", {key} {in_yaml(value)}" for key, value in options.items() if value != defaults[key]]
    spec = {"rule": rule} if isinstance(rule, str) else rule
    yield f"credit: {in_yaml(spec)}, {estimator}, group_by {groups}{''.join(others)}"
