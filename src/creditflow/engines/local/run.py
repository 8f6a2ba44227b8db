"""The life cycle of a run and its folder: start, resume, save, roll back.

Independent of sampling and updates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from creditflow._utils.progress import Reporter
from creditflow.config import Config
from creditflow.credit import Threshold
from creditflow.credit.history import History
from creditflow.engines.common.checkpoints import saved_steps, step_of
from creditflow.engines.common.components import Components
from creditflow.engines.common.guard import control_state, load_control_state, roll_back
from creditflow.engines.common.rollouts import total_steps
from creditflow.engines.common.run import (
    FINISHED,
    LONGER,
    create_folder,
    data_facts,
    expect_unchanged,
    folder_error,
    read_facts,
    run_facts,
    say_changes,
)
from creditflow.engines.common.tracked import FolderTrackers
from creditflow.engines.local import checkpoint
from creditflow.engines.local.policy_set import PolicySet
from creditflow.errors import ConfigError
from creditflow.monitoring.guard import Guard, GuardEvent, GuardStop
from creditflow.runs import RunFolder
from creditflow.runs.run_folder import rollbacks

NAME = "local"
"""The engine's name, in `run.json` and on the command line."""
_PEAK = "memory/peak_gib"
_KEPT = ("tasks_taken", "generated_tokens", "audit_tokens", "evaluated")
"""Attributes of `RunState` that a checkpoint keeps as they are."""


@dataclass(slots=True)
class RunState:
    """The state of a run."""

    folder: RunFolder
    components: Components
    policy_set: PolicySet
    threshold: Threshold
    guard: Guard
    reporter: Reporter
    history: History = field(default_factory=History)
    """The statistics of earlier steps that fitted parts of credit read."""
    done: int = 0
    """The number of finished training steps."""
    tasks_taken: int = 0
    """The number of tasks taken since the start of the run."""
    evaluated: bool = True
    """False if the run was interrupted in the evaluation after step `done`."""
    rollbacks: int = 0
    """The number of rollbacks by the guard."""
    trackers: FolderTrackers | None = None
    generated_tokens: int = 0
    """Response tokens that training has generated since the start of the run."""
    audit_tokens: int = 0
    """Response tokens that measurements of fidelity have generated."""

    @property
    def config(self) -> Config:
        """The recipe's options."""
        return self.components.recipe.config

    def warn(self, events: Sequence[GuardEvent]) -> None:
        """Record and print events of failures."""
        self.folder.append_events(event.to_dict() for event in events)
        for event in events:
            self.reporter.say(event.text)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a step's metrics to the run's folder and the trackers."""
        self.folder.append_metrics(step, metrics)
        if self.trackers is not None:
            self.trackers.send_step(step, metrics)

    def save(self, keep: int | None) -> None:
        """Save a checkpoint of step `done` and keep the newest `keep`."""
        state = {
            **control_state(self.threshold, self.guard, self.history),
            "rollbacks": self.rollbacks,
            **{name: getattr(self, name) for name in _KEPT},
        }
        checkpoint.save(self.folder.path, self.done, self.policy_set, state, keep)

    def restore(self, step: int, state: Mapping[str, Any]) -> None:
        """Restore the state of the checkpoint of `step`. Its models are loaded separately."""
        self.history = load_control_state(state, self.threshold, self.guard)
        self.done = step
        for name in _KEPT:
            setattr(self, name, state[name])

    def narrow_or_widen(self, metrics: Mapping[str, float]) -> GuardEvent | None:
        """Train adapters while credit has fallen back, if `fallback.trainable` is `lora`, then all weights again.

        Returns an event after a change, with the peak memory before it.
        """
        policy_set = self.policy_set
        narrows = self.guard.fallback and policy_set.fallback.trainable == "lora" and policy_set.can_narrow
        if narrows == policy_set.narrowed:
            return None
        (policy_set.narrow if narrows else policy_set.widen)()
        what = "adapters alone are trained" if narrows else "all weights again"
        numbers = {"before": metrics[_PEAK]} if _PEAK in metrics else {}
        return GuardEvent(self.done, "fallback", _PEAK, what, "lora", numbers, note="what is trained follows credit")


def begin(
    components: Components, path: Path, policy_set: PolicySet, threshold: Threshold, guard: Guard, reporter: Reporter
) -> RunState:
    """Start a run in `path`, or resume its run from the newest intact checkpoint."""
    recipe, steps = components.recipe, total_steps(len(components.train_tasks), components.recipe.config)
    parts = (components, policy_set, threshold, guard, reporter)
    if (began := read_facts(path, NAME)) is None:
        facts = run_facts(
            recipe,
            NAME,
            ("torch", "transformers", "numpy"),
            device=str(policy_set.device),
            derived=policy_set.sizes,
            parameters=sum(w.numel() for actor in policy_set.actors.values() for w in actor.policy.parameters),
            **data_facts(components, steps),
        )
        return RunState(create_folder(recipe, path, facts, reporter), *parts)
    folder = RunFolder.open(path)
    # The run keeps its derived micro-batch sizes, so that another machine's memory does not change it.
    derived = began["derived"].items()
    policy_set.set_sizes({key: size for key, size in derived if attrgetter(key)(recipe.config) is None})
    back_to = rollbacks(path)
    named = recipe.config.trainer.resume_from_path
    if named is not None:
        step = step_of(path, named)
        state = checkpoint.load(path, step, policy_set)
    else:
        # A rollback that was killed may have left checkpoints that it discards: skip them.
        step, state = checkpoint.newest(
            path,
            policy_set,
            reporter.say,
            lambda step, state: all(step <= target for target in back_to[state["rollbacks"] :]),
        ) or (0, {})
    checkpoint.sweep(path, step)
    folder.rewind(step if state else -1)
    run = RunState(folder, *parts, rollbacks=len(back_to))
    if state:
        run.restore(step, state)
    reporter.say(f"run folder: {folder.path}, goes on after step {step}")
    say_changes(began, recipe, data_facts(components, steps), reporter)
    return run


def expect_resumable(components: Components, path: Path, steps: int) -> None:
    """Raise InputError if `path` holds a run that the recipe cannot resume."""
    recipe, trainer = components.recipe, components.recipe.config.trainer
    facts = read_facts(path, NAME)
    if facts is None:
        if trainer.resume_mode == "resume_path":
            raise ConfigError(f"trainer.resume_from_path: {path} holds no run; name its folder as default_local_dir")
        return
    if trainer.resume_mode == "disable":
        raise folder_error(path, "already, and trainer.resume_mode is disable")
    if trainer.resume_mode == "auto":
        expect_unchanged(path, facts, recipe, data_facts(components, steps))
        if (newest := next(iter(saved_steps(path)), 0)) > steps:
            raise folder_error(path, f"that has come to step {newest} already, and the recipe ends at {steps}", LONGER)
        if (path / FINISHED).exists() and steps in saved_steps(path)[:1]:
            raise folder_error(path, f"that is finished, at step {steps}", LONGER)
    elif step_of(path, trainer.resume_from_path) > steps:
        raise ConfigError(
            f"trainer.resume_from_path: {trainer.resume_from_path} is of a later step than {steps}, at which the "
            "recipe ends; raise trainer.total_training_steps"
        )


def apply_guard_action(action: GuardEvent, run: RunState) -> None:
    """Roll back to the last good checkpoint.

    Raises GuardStop if the guard stops the run or no rollback is possible.
    """
    path = run.folder.path

    def restore_good() -> int | None:
        good = checkpoint.newest(path, run.policy_set, run.reporter.say, lambda step, state: state["good"])
        if good is None:
            return None
        run.restore(*good)
        return run.done

    try:
        limit = run.config.guard.max_rollbacks
        message = roll_back(action, run.folder, run.rollbacks, limit, restore_good, checkpoint.sweep)
    except GuardStop:
        if not saved_steps(path):
            run.save(None)  # without it, the trained weights would be lost
        raise
    run.rollbacks += 1
    run.reporter.say(message)
