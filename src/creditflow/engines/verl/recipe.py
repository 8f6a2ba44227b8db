"""Store a recipe in verl's configuration, which carries it to the processes of a cluster."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from creditflow.config import Config, Recipe, recipe_of_dict

NAME = "verl"
"""The engine's name, in `run.json` and on the command line."""
KEY = "creditflow"
"""The recipe's top-level key in verl's configuration, and the name of the agent loop in verl's registry."""

STATE, LATEST = "creditflow.json", "latest_checkpointed_iteration.txt"
"""The file with creditflow's state in a verl checkpoint, and verl's file that names the newest checkpoint."""
TRAINER_PREFIX = "creditflow_"
"""The prefix of the trainers' names in verl's registry, before that of the mode."""


@dataclass(frozen=True, slots=True)
class RunHandle:
    """The recipe and run folder, for every process of a run."""

    recipe: Recipe
    run_folder: Path
    """An absolute path on a file system that the driver's node shares with the launching node."""

    @property
    def config(self) -> Config:
        """The recipe's options."""
        return self.recipe.config

    @property
    def token(self) -> str:
        """A part of the names of the run's cluster resources, which makes them unique on a shared cluster."""
        return hashlib.sha256(str(self.run_folder).encode()).hexdigest()[:8]


def recipe_section(recipe: Recipe, run_folder: Path) -> dict[str, str]:
    """The section `creditflow` of verl's configuration."""
    text = json.dumps(recipe.to_dict())
    # OmegaConf would read a dollar sign as the start of an interpolation.
    return {
        "recipe": text.replace("$", "\\u0024"),
        "name": recipe.name,
        "folder": str(recipe.folder),
        "run_folder": str(run_folder.absolute()),
    }


def read_run_handle(verl_config: Any) -> RunHandle:
    """Read the recipe from verl's configuration; the inverse of `recipe_section`."""
    section: Mapping[str, str] = verl_config[KEY]
    recipe = recipe_of_dict(json.loads(section["recipe"]), section["name"], Path(section["folder"]))
    return RunHandle(recipe, Path(section["run_folder"]))
