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
from creditflow.data.curriculum import Curriculum
from creditflow.engines.common.checkpoints import saved_steps, step_of
from creditflow.engines.common.components import Components, build_curriculum, restore_curriculum
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
from creditflow.monitoring import Guard, GuardEvent, GuardStop
from creditflow.runs import RunFolder
from creditflow.runs.run_folder import rollbacks

NAME = "local"
"""The engine's name, in `run.json` and on the command line."""
_PEAK = "memory/peak_gib"


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
    curriculum: Curriculum | None = None
    """The order of the tasks with `data.curriculum`."""
    peak_before: float | None = None
    """Peak memory in GiB of the step before the fallback to adapters; None after the comparison."""

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
            "peak_before": self.peak_before,
            "tasks_taken": self.tasks_taken,
            "generated_tokens": self.generated_tokens,
            "audit_tokens": self.audit_tokens,
            "evaluated": self.evaluated,
            "curriculum": None if self.curriculum is None else self.curriculum.to_json(),
        }
        checkpoint.save(self.folder.path, self.done, self.policy_set, state, keep)

    def restore(self, step: int, state: Mapping[str, Any]) -> None:
        """Restore the state of the checkpoint of `step`. Its models are loaded separately."""
        self.history = load_control_state(state, self.threshold, self.guard)
        self.done, self.tasks_taken, self.evaluated = step, state["tasks_taken"], state["evaluated"]
        self.generated_tokens, self.audit_tokens = state["generated_tokens"], state["audit_tokens"]
        self.peak_before = state["peak_before"]
        restore_curriculum(self.curriculum, state)

    def narrow_or_widen(self, metrics: Mapping[str, float]) -> GuardEvent | None:
        """Train adapters while credit has fallen back, if `fallback.trainable` is `lora`, then all weights again.

        Returns an event after a change, and one with the peak memory before and after the change to adapters.
        """
        policy_set, peak = self.policy_set, metrics.get(_PEAK)
        narrows = self.guard.fallback and policy_set.fallback.trainable == "lora" and policy_set.can_narrow
        if narrows != policy_set.narrowed:
            (policy_set.narrow if narrows else policy_set.widen)()
            self.peak_before = peak if narrows else None
            return self._adapter_event("adapters alone are trained" if narrows else "all weights again", before=peak)
        if self.peak_before is None:
            return None
        before, self.peak_before = self.peak_before, None
        return self._adapter_event("measured", before=before, after=peak)

    def _adapter_event(self, what: str, **gib: float | None) -> GuardEvent:
        numbers = {name: value for name, value in gib.items() if value is not None}
        return GuardEvent(self.done, "fallback", _PEAK, what, "lora", numbers, note="what is trained follows credit")


def begin(
    components: Components, path: Path, policy_set: PolicySet, threshold: Threshold, guard: Guard, reporter: Reporter
) -> RunState:
    """Start a run in `path`, or resume its run from the newest intact checkpoint."""
    recipe, steps = components.recipe, total_steps(len(components.train_tasks), components.recipe.config)
    curriculum = build_curriculum(components.train_tasks, recipe.config)
    if (began := read_facts(path, NAME)) is None:
        actors = policy_set.actors.values()
        facts = run_facts(
            recipe,
            NAME,
            ("torch", "transformers", "numpy"),
            device=str(next(iter(policy_set.policies.values())).device),
            derived=policy_set.sizes,
            parameters=sum(weight.numel() for actor in actors for weight in actor.policy.parameters),
            **data_facts(components, steps),
        )
        folder = create_folder(recipe, path, facts, reporter)
        return RunState(folder, components, policy_set, threshold, guard, reporter, curriculum=curriculum)
    folder = RunFolder.open(path)
    # The run keeps its derived micro-batch sizes, so that another machine's memory does not change it.
    derived: dict[str, int] = began.get("derived", {})
    policy_set.set_sizes({key: size for key, size in derived.items() if attrgetter(key)(recipe.config) is None})
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
    run = RunState(
        folder, components, policy_set, threshold, guard, reporter, rollbacks=len(back_to), curriculum=curriculum
    )
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
    path, states = run.folder.path, dict[int, Mapping[str, Any]]()

    def load_good() -> int | None:
        good = checkpoint.newest(path, run.policy_set, run.reporter.say, lambda step, state: state["good"])
        states.update([] if good is None else [good])
        return next(iter(states), None)

    try:
        limit = run.config.guard.max_rollbacks
        message = roll_back(action, run.folder, run.rollbacks, limit, load_good, checkpoint.sweep)
    except GuardStop:
        if not saved_steps(path):
            run.save(None)  # without it, the trained weights would be lost
        raise
    run.rollbacks += 1
    for step, state in states.items():
        run.restore(step, state)
    run.reporter.say(message)
