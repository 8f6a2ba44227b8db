"""The curriculum of a recipe, and its part of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from creditflow.config import Config
from creditflow.data import Task
from creditflow.data.curriculum import Curriculum, CurriculumRule


def build_curriculum(tasks: Sequence[Task], config: Config) -> Curriculum | None:
    """The curriculum of `data.curriculum`; None without one. Raises DataError if the tasks have one level each."""
    if (section := config.data.curriculum) is None:
        return None
    rule = CurriculumRule(**section.model_dump())
    return Curriculum(tasks, rule, config.data.seed, shuffle=config.data.shuffle)


def restore_curriculum(curriculum: Curriculum | None, state: Mapping[str, Any]) -> None:
    """Restore the curriculum of a checkpoint's state. A checkpoint without one leaves it at its beginning."""
    if curriculum is not None and (kept := state.get("curriculum")) is not None:
        curriculum.restore(kept)
