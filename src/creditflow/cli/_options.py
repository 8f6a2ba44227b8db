"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from creditflow.errors import ConfigError

Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Recipe options to set, such as data.seed=1.")
]
Host = Annotated[str, typer.Option(help="The address to listen on.")]
AllowRemote = Annotated[bool, typer.Option("--allow-remote", help="Allow a --host that other machines can reach.")]
EngineName = Annotated[
    str, typer.Option("--engine", metavar="NAME", help="local: in this process. verl: on a Ray cluster. Or another.")
]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the numbers to FILE.")]


def comma_separated(text: str) -> tuple[str, ...]:
    """The non-empty parts of `a,b,c`, without blanks around them."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def expect_json_folder(file: Path | None) -> None:
    """Raise ConfigError if the folder of the file of `--json` is missing."""
    if file is not None and not file.absolute().parent.is_dir():
        raise ConfigError(f"--json: no folder {file.parent}")
