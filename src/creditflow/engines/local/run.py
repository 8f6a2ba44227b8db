"""The life cycle of a run and its folder: start, resume, save, roll back.

Independent of tasks and updates.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from creditflow._utils.progress import Reporter
from creditflow.config import Recipe, different_options
from creditflow.credit import Threshold
from creditflow.engines.local import checkpoint
from creditflow.engines.local.policy_set import PolicySet
from creditflow.errors import ConfigError, InputError
from creditflow.monitoring import Guard, GuardEvent, GuardStop
from creditflow.monitoring.guard import RESTORE, cannot_go_back, stop_report
from creditflow.monitoring.trackers import Trackers
from creditflow.runs import RunFolder
from creditflow.runs.run_folder import rollbacks

_PEAK = "memory/peak_gib"


@dataclass(slots=True)
class RunState:
    """The state of a run."""

    folder: RunFolder
    policy_set: PolicySet
    threshold: Threshold
    guard: Guard
    done: int = 0
    """The number of finished training steps."""
    tasks_taken: int = 0
    """The number of tasks taken since the start of the run."""
    evaluated: bool = True
    """False if the run was interrupted in the evaluation after step `done`."""
    rollbacks: int = 0
    """The number of rollbacks by the guard."""
    trackers: Trackers = field(default_factory=lambda: Trackers(print))
    peak_before: float | None = None
    """Peak memory in GiB of the step before the fallback to adapters; None after the comparison."""

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a step's metrics to the run's folder and the trackers."""
        self.folder.append_metrics(step, metrics)
        self.trackers.log(step, metrics)

    def save(self, keep: int | None) -> None:
        """Save a checkpoint of step `done` and keep the newest `keep`."""
        state = {
            "threshold": self.threshold.state_dict(),
            "guard": self.guard.state_dict(),
            "good": self.guard.good,
            "rollbacks": self.rollbacks,
            "peak_before": self.peak_before,
            "tasks_taken": self.tasks_taken,
            "evaluated": self.evaluated,
        }
        checkpoint.save(self.folder.path, self.done, self.policy_set, state, keep)

    def take(self, step: int, state: Mapping[str, Any]) -> None:
        """Restore the state of the checkpoint of `step`. Its models are loaded separately."""
        self.threshold.load_state_dict(state["threshold"])
        self.guard.load_state_dict(state["guard"])
        self.done, self.tasks_taken, self.evaluated = step, state["tasks_taken"], state["evaluated"]
        self.peak_before = state["peak_before"]

    def narrow_or_widen(self, metrics: Mapping[str, float]) -> GuardEvent | None:
        """Train adapters while credit has fallen back, if `fallback.trainable` is `lora`, then all weights again.

        Returns an event after a change, and one with the peak memory before and after the change to adapters.
        """
        policy_set, peak = self.policy_set, metrics.get(_PEAK)
        wanted = self.guard.fallback and policy_set.fallback.trainable == "lora" and policy_set.can_narrow
        if wanted != policy_set.narrowed:
            (policy_set.narrow if wanted else policy_set.widen)()
            self.peak_before = peak if wanted else None
            return self._of_adapters("adapters alone are trained" if wanted else "all weights again", before=peak)
        if self.peak_before is None:
            return None
        before, self.peak_before = self.peak_before, None
        return self._of_adapters("measured", before=before, after=peak)

    def _of_adapters(self, what: str, **gib: float | None) -> GuardEvent:
        numbers = {name: value for name, value in gib.items() if value is not None}
        return GuardEvent(self.done, "fallback", _PEAK, what, "lora", numbers, note="what is trained follows credit")


def begin(
    recipe: Recipe, path: Path, policy_set: PolicySet, threshold: Threshold, guard: Guard, reporter: Reporter
) -> RunState:
    """Start a run in `path`, or resume its run from the newest intact checkpoint."""
    if not (path / "run.json").exists():
        folder = RunFolder.create(path, run_facts(recipe, policy_set), recipe.to_yaml())
        reporter.say(f"run folder: {folder.path}")
        return RunState(folder, policy_set, threshold, guard)
    folder = RunFolder.open(path)
    back_to = rollbacks(path)
    named = recipe.config.trainer.resume_from_path
    if named is not None:
        found = checkpoint.step_of(path, named)
        state = checkpoint.load(path, found, policy_set)
    else:
        # A rollback that was killed may have left checkpoints that it discards: skip them.
        found, state = checkpoint.newest(
            path,
            policy_set,
            reporter.say,
            lambda step, state: all(step <= led for led in back_to[state["rollbacks"] :]),
        ) or (0, {})
    checkpoint.sweep(path, found)
    folder.rewind(found if state else -1)
    run = RunState(folder, policy_set, threshold, guard, rollbacks=len(rollbacks(path)))
    if state:
        run.take(found, state)
    reporter.say(f"run folder: {folder.path}, goes on after step {found}")
    return run


def expect_to_go_on(recipe: Recipe, path: Path, steps: int) -> None:
    """Raise InputError if `path` holds a run that `recipe` cannot resume."""
    trainer = recipe.config.trainer
    if not (path / "run.json").exists():
        if trainer.resume_mode == "resume_path":
            raise ConfigError(f"trainer.resume_from_path: {path} holds no run; name its folder as default_local_dir")
        return
    holds = f"trainer.default_local_dir: {path} holds a run"
    if trainer.resume_mode == "disable":
        raise InputError(f"{holds} already, and trainer.resume_mode is disable; name another folder")
    try:
        facts = json.loads((path / "run.json").read_text())
        engine, began = facts["engine"], facts["config"]
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{holds} already, whose run.json does not say what it is; name another folder") from None
    if engine != "local":
        raise InputError(f"{holds} of --engine {engine}; name another folder")
    if trainer.resume_mode == "auto":
        now = json.loads(json.dumps(recipe.to_dict()))
        changed = sorted(set(different_options(began, now)) - MAY_CHANGE)
        if changed := [key for key in changed if not key.startswith("guard.")]:
            raise InputError(
                f"{holds} that began with another {', '.join(changed)}; name another folder, or go on all the same by "
                "trainer.resume_mode=resume_path"
            )
        if (newest := next(iter(checkpoint.saved_steps(path)), 0)) > steps:
            raise InputError(
                f"{holds} that has come to step {newest} already, and the recipe ends at {steps}; name another folder, "
                "or raise trainer.total_training_steps"
            )
        if (path / "evaluation.json").exists() and steps in checkpoint.saved_steps(path)[:1]:
            raise InputError(
                f"{holds} that is finished, at step {steps}; name another folder, or raise trainer.total_training_steps"
            )
    elif checkpoint.step_of(path, str(trainer.resume_from_path)) > steps:
        raise ConfigError(
            f"trainer.resume_from_path: {trainer.resume_from_path} is of a later step than {steps}, at which the "
            "recipe ends; raise trainer.total_training_steps"
        )


MAY_CHANGE = {
    f"trainer.{name}"
    for name in (
        *("default_local_dir", "total_training_steps", "total_epochs", "save_freq", "test_freq"),
        *("resume_mode", "resume_from_path", "max_actor_ckpt_to_keep"),
        *("logger", "project_name", "experiment_name"),
    )
}
"""Options that may change when a run resumes, besides those of the guard."""


def apply_guard_action(asked: GuardEvent, run: RunState, max_rollbacks: int, reporter: Reporter) -> None:
    """Roll back to the last good checkpoint.

    Raises GuardStop if the guard stops the run or no rollback is possible.
    """
    folder, found = run.folder, None
    why = cannot_go_back(run.rollbacks, max_rollbacks) if asked.action == RESTORE else ""
    if asked.action == RESTORE and run.rollbacks < max_rollbacks:
        found = checkpoint.newest(folder.path, run.policy_set, reporter.say, lambda step, state: state["good"])
    if found is None:
        if not checkpoint.saved_steps(folder.path):
            run.save(None)  # without it, the trained weights would be lost
        folder.append_events([asked.to_dict()])
        raise GuardStop(stop_report(asked, folder.path, why))
    step, state = found
    run.rollbacks += 1
    # The event comes first: if the process is killed during the rollback, the resumed run completes it.
    folder.append_events([asked.to_dict()], back_to=step)
    checkpoint.sweep(folder.path, step)
    folder.rewind(step, aside=f"rolled_back/{run.rollbacks}")
    run.take(step, state)
    reporter.say(
        f"guard: goes on after step {step}; what came after is kept in {folder.path}/rolled_back/{run.rollbacks}"
    )


def run_path(recipe: Recipe) -> Path:
    """`trainer.default_local_dir`, else runs/<recipe>-<time>."""
    named = recipe.config.trainer.default_local_dir
    if named:
        return Path(named)
    path = Path("runs") / f"{recipe.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    # Two runs that start in the same second must not share a folder.
    return path if not path.exists() else path.with_name(f"{path.name}-{os.getpid()}")


def run_facts(recipe: Recipe, policy_set: PolicySet) -> dict[str, object]:
    """The content of `run.json`: configuration, versions, seed, machine."""
    return {
        "recipe": recipe.name,
        "engine": "local",
        "seed": recipe.config.data.seed,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": str(next(iter(policy_set.policies.values())).device),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("creditflow", "torch", "transformers", "numpy")},
        "parameters": sum(weight.numel() for actor in policy_set.actors.values() for weight in actor.policy.parameters),
        "config": recipe.to_dict(),
    }
