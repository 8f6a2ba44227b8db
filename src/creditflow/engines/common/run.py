"""A run's folder: path, facts, start and resumption."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from creditflow._utils.files import alone_in, make_folder
from creditflow._utils.progress import Reporter
from creditflow.config import Recipe, different_options
from creditflow.config.loading import without_removed
from creditflow.data import Task
from creditflow.engines.common.components import Components
from creditflow.errors import InputError
from creditflow.runs import RunFolder
from creditflow.runs.step_files import expect_format

FINISHED = "evaluation.json"
"""The file of a finished run's last evaluation, written last."""

MAY_CHANGE = {
    f"trainer.{name}"
    for name in (
        *("default_local_dir", "total_training_steps", "total_epochs", "save_freq", "test_freq", "test_delay"),
        *("resume_mode", "resume_from_path", "max_actor_ckpt_to_keep"),
        *("logger", "project_name", "experiment_name"),
    )
}
"""Options that may change when a run resumes, besides those of the guard."""


def run_path(recipe: Recipe) -> Path:
    """`trainer.default_local_dir`, else runs/<recipe>-<time>."""
    named = recipe.config.trainer.default_local_dir
    if named:
        return Path(named)
    path = Path("runs") / f"{recipe.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    # Two runs that start in the same second must not share a folder.
    return path if not path.exists() else path.with_name(f"{path.name}-{os.getpid()}")


@contextmanager
def sole_writer(path: Path) -> Iterator[None]:
    """Hold the lock of a run's folder, which is created if it is missing.

    Raises InputError if another process is training in it: both would write the same files.
    """
    make_folder(path, "trainer.default_local_dir")
    refused = InputError(
        f"trainer.default_local_dir: another process is training in {path}; wait for its end, or name another folder"
    )
    with alone_in(path, refused):
        yield


def run_facts(recipe: Recipe, engine: str, packages: Sequence[str], **facts: object) -> dict[str, object]:
    """The content of `run.json`: configuration, versions, seed, machine and the engine's own `facts`.

    `packages`: distributions with a recorded version, besides creditflow.
    """
    return {
        "recipe": recipe.name,
        "engine": engine,
        "seed": recipe.config.data.seed,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("creditflow", *packages)},
        **facts,
        "config": recipe.to_dict(),
    }


def data_facts(components: Components, steps: int) -> dict[str, object]:
    """The facts of a run of `steps` training steps that show whether it resumes with the same tasks and length."""
    tasks = {"data.train_files": components.train_tasks, "data.val_files": components.val_tasks}
    return {"steps": steps, "tasks": {key: _content(split) for key, split in tasks.items()}}


def _content(tasks: Sequence[Task]) -> str:
    """The number of tasks, and a hash of their content and order."""
    digest = hashlib.sha256()
    for task in tasks:
        digest.update(repr(task).encode(errors="replace"))
    return f"{len(tasks)} tasks, sha256 {digest.hexdigest()[:12]}"


def read_facts(path: Path, engine: str) -> dict[str, Any] | None:
    """The `run.json` of the run in `path`; None without a run.

    Raises InputError if it cannot be read, or if another engine began the run; DataError for another format version;
    ConfigError for an option that was removed since.
    """
    if not (path / "run.json").exists():
        return None
    try:
        facts: dict[str, Any] = json.loads((path / "run.json").read_text())
        began, _ = facts["engine"], dict(facts["config"])
    except (ValueError, KeyError, TypeError):
        raise folder_error(path, "already, whose run.json does not say what it is") from None
    if began != engine:
        raise folder_error(path, f"of --engine {began}")
    expect_format(path / "run.json", facts.get("format", 1))
    return facts | {"config": without_removed(facts["config"], facts)}


def changed_options(facts: Mapping[str, Any], recipe: Recipe, now: Mapping[str, Any]) -> list[str]:
    """The options that differ from those the run began with, except those that may change when it resumes.

    Tasks that differ count as their option, even if a file has the same name. `now`: the present `data_facts`.
    """
    changed = set(different_options(facts["config"], json.loads(json.dumps(recipe.to_dict())))) - MAY_CHANGE
    options = sorted(key for key in changed if not key.startswith("guard."))
    began = facts.get("tasks", {})
    # The order of tasks, and those already trained on, follow from their number and the seed.
    tasks = {key: content for key, content in now["tasks"].items() if key not in changed}
    return options + [
        f"{key} ({began[key]}, now {content})" for key, content in tasks.items() if began.get(key, content) != content
    ]


def expect_unchanged(path: Path, facts: Mapping[str, Any], recipe: Recipe, now: Mapping[str, Any]) -> None:
    """Raise InputError if options or tasks of the run in `path` have changed; see `changed_options`."""
    if changed := changed_options(facts, recipe, now):
        named = "continue with trainer.resume_mode=resume_path and trainer.resume_from_path=CHECKPOINT"
        raise folder_error(path, f"whose options have changed since its start: {', '.join(changed)}", named)


def say_changes(facts: Mapping[str, Any], recipe: Recipe, now: Mapping[str, Any], reporter: Reporter) -> None:
    """Print changed options and tasks, and a changed length, of a run that resumes."""
    if changed := changed_options(facts, recipe, now):
        reporter.say(f"warning: options have changed since the start of the run: {', '.join(changed)}")
    if (began := facts.get("steps", now["steps"])) != now["steps"]:
        reporter.say(
            f"the run began with {began} training steps and now has {now['steps']}: a cosine schedule continues at its "
            "value for the new length"
        )


def folder_error(path: Path, state: str, *remedies: str) -> InputError:
    """The error for a folder with a run that does not resume because of its `state`."""
    how = ", or ".join(("name another folder", *remedies))
    return InputError(f"trainer.default_local_dir: {path} holds a run {state}; {how}")


LONGER = "raise trainer.total_training_steps"
"""The remedy for a run that has come to its last step."""


def create_folder(recipe: Recipe, path: Path, facts: Mapping[str, object], reporter: Reporter) -> RunFolder:
    """Create the folder of a new run and print its path."""
    folder = RunFolder.create(path, facts, recipe.to_yaml())
    reporter.say(f"run folder: {folder.path}")
    return folder
