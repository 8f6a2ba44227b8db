"""A recipe inside verl's configuration: how it travels to the processes of a cluster. Knows nothing of verl."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from creditflow.config import Config, Recipe, recipe_of_dict

KEY = "creditflow"
"""The top-level key of verl's configuration under which all this stands."""


@dataclass(frozen=True, slots=True)
class Carried:
    """What every process of a run reads."""

    recipe: Recipe
    run_folder: Path
    """Absolute; on a file system that the driver's node shares with the one that launches."""

    @property
    def config(self) -> Config:
        """The recipe's options."""
        return self.recipe.config

    @property
    def token(self) -> str:
        """Stands in the names of what the run makes on a cluster that it may share with others."""
        return hashlib.sha256(str(self.run_folder).encode()).hexdigest()[:8]


def carry(recipe: Recipe, run_folder: Path) -> dict[str, str]:
    """What stands under `creditflow` in verl's configuration."""
    text = json.dumps(recipe.to_dict())
    # A dollar sign would be the beginning of an interpolation to whoever resolves the configuration.
    return {
        "recipe": text.replace("$", "\\u0024"),
        "name": recipe.name,
        "folder": str(recipe.folder),
        "run_folder": str(run_folder.absolute()),
    }


def carried(verl_config: Any) -> Carried:
    """The inverse of `carry`, from verl's configuration."""
    section: Mapping[str, str] = verl_config[KEY]
    recipe = recipe_of_dict(json.loads(section["recipe"]), section["name"], Path(section["folder"]))
    return Carried(recipe, Path(section["run_folder"]))
