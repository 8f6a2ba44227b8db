"""Recipes shipped with creditflow, found by their bare names.

The folder `recipes` is no package: a recipe's Python files are loaded by path, as users' files are.
"""

from __future__ import annotations

from pathlib import Path

RECIPES = Path(__file__).parents[1] / "recipes"
"""The folder of the shipped recipes."""


def find_recipe(name: Path | str, folder: Path = Path()) -> Path:
    """Find a recipe by its path relative to `folder`, or a shipped one by its bare name, with or without `.yaml`.

    A file in `folder` comes first. Returns the path in `folder` if neither exists.
    """
    path = folder / name
    if path.is_file() or Path(name).name != str(name):
        return path
    shipped = RECIPES / f"{path.name.removesuffix('.yaml')}.yaml"
    return shipped if shipped.is_file() else path


def shipped_recipes() -> list[str]:
    """The names of the shipped recipes, in alphabetical order."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))
