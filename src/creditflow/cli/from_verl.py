"""`creditflow from-verl`: a recipe from a command of verl."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from creditflow._utils.progress import Reporter
from creditflow.errors import InputError


class CommandClass(TyperCommand):
    """Command whose arguments may look like options, as `--config-name=x` of verl does."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.ignore_unknown_options = True


def from_verl(
    overrides: Annotated[list[str], typer.Argument(metavar="KEY=VALUE", help="Those of verl.trainer.main_ppo.")],
    *,
    output: Annotated[
        Path | None, typer.Option("-o", metavar="FILE", help="Write it here, and team.py beside it.")
    ] = None,
) -> None:
    """Print the recipe of a command of verl.

    In your script, write `creditflow from-verl` for `python3 -m verl.trainer.main_ppo`. Options that no recipe can have
    are comments at its end, each with the reason. Paths are relative to the recipe.
    """
    from creditflow.engines.verl.from_command import WORKFLOW, recipe_text

    text = recipe_text(overrides)
    if output is None:
        print(text, end="")
        return
    if output.exists():
        raise InputError(f"-o: {output} exists; name another file")
    output.write_text(text)
    if not (team := output.with_name("team.py")).exists():
        team.write_text(WORKFLOW)
    Reporter().say(f"next: creditflow train {output} --engine verl --dry-run")
