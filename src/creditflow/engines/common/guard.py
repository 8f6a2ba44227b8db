"""The guard of a recipe, its events and its actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from creditflow.config import Config, default_rules, policies_in_use
from creditflow.credit import Threshold
from creditflow.credit.history import History
from creditflow.monitoring.catalog import Names, described
from creditflow.monitoring.guard import (
    RESTORE,
    Guard,
    GuardEvent,
    GuardStop,
    cannot_go_back,
    engine_action,
    stop_report,
)
from creditflow.rewards import RewardFunction
from creditflow.runs import RunFolder


def build_guard(config: Config, folder: Path, functions: Sequence[RewardFunction], engine: str) -> Guard:
    """Build a recipe's guard, without rules if `guard.enable` is false.

    `folder`: the base of `file.py:kind`. `functions`: the recipe's reward functions. `engine`: its name. A default
    rule on a metric that the engine lacks is left out. Raises ConfigError for an invalid rule or an unknown metric.
    """
    if not config.guard.enable:
        return Guard(())
    names, defaults = metric_names(config, [function.name for function in functions], engine), default_rules()
    rules = {
        name: rule
        for name, rule in config.guard.rules.items()
        if rule is None or rule != defaults.get(name) or described(rule["metric"], names) is not None
    }
    return Guard.from_rules(
        rules,
        names,
        config.credit,
        has_outcome=any(function.level == "outcome" for function in functions),
        folder=folder,
    )


def metric_names(config: Config, functions: Sequence[str], engine: str) -> Names:
    """The names that a recipe's metrics contain."""
    return Names(
        agents=tuple(config.team.agents),
        functions=functions,
        policies=tuple(policies_in_use(config)),
        rules=tuple(config.guard.rules),
        engine=engine,
    )


def run_guard(
    guard: Guard,
    step: int,
    metrics: Mapping[str, float],
    folder: RunFolder,
    adapt: Callable[[Mapping[str, float]], GuardEvent | None] = lambda metrics: None,
) -> tuple[list[GuardEvent], GuardEvent | None]:
    """Run the guard on a step's metrics and record its events.

    `adapt`: called after the guard; returns a further event of the engine. Returns all events, and the one that the
    engine must act on (see `roll_back`), which is not recorded yet.
    """
    events = guard.look(step, metrics)
    action = engine_action(events)
    if (adapted := adapt(metrics)) is not None:
        events.append(adapted)
    folder.append_events(event.to_dict() for event in events if event is not action)
    return events, action


def roll_back(
    action: GuardEvent,
    folder: RunFolder,
    rollbacks: int,
    max_rollbacks: int,
    newest_good: Callable[[], int | None],
    sweep: Callable[[Path, int], None],
) -> str:
    """Rewind a run's folder to its newest good checkpoint; returns the message for the user.

    `rollbacks`: the number so far. `newest_good`: returns the checkpoint's training step, or None. `sweep`: removes
    the checkpoints after a step from the run's folder. Raises GuardStop if the guard stops the run or no rollback is
    possible.
    """
    restores = action.action == RESTORE
    good = newest_good() if restores and rollbacks < max_rollbacks else None
    if good is None:
        folder.append_events([action.to_dict()])
        reason = cannot_go_back(rollbacks, max_rollbacks) if restores else ""
        raise GuardStop(stop_report(action, folder.path, reason))
    # The event comes first: if the process is killed during the rollback, the resumed run completes it.
    folder.append_events([action.to_dict()], back_to=good)
    sweep(folder.path, good)
    aside = f"rolled_back/{rollbacks + 1}"
    folder.rewind(good, aside=aside)
    return f"guard: goes on after step {good}; what came after is kept in {folder.path}/{aside}"


def control_state(threshold: Threshold, guard: Guard, history: History) -> dict[str, Any]:
    """The part of a checkpoint's state that credit assignment and the guard need."""
    return {
        "threshold": threshold.state_dict(),
        "guard": guard.state_dict(),
        "good": guard.good,
        "history": history.to_json(),
    }


def load_control_state(state: Mapping[str, Any], threshold: Threshold, guard: Guard) -> History:
    """Restore a threshold and a guard from the result of `control_state`; returns the history of fitted parts."""
    threshold.load_state_dict(state["threshold"])
    guard.load_state_dict(state["guard"])
    return History.from_json(state["history"]) if "history" in state else History()  # older checkpoints have none
