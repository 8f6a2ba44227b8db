"""`creditflow check`: roll out a few tasks, assign credit without training, and report problems."""

from __future__ import annotations

import math
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from rich.table import Table

from creditflow._utils.progress import Reporter
from creditflow._utils.tracebacks import of_function
from creditflow.cli._options import EngineName, Overrides, Recipe, credit_lines, number_option
from creditflow.credit import Assignment, assign
from creditflow.credit.analysis.linter import idle_gate, lint
from creditflow.credit.analysis.metrics import reach
from creditflow.data import Trajectory, TrajectoryBatch
from creditflow.errors import TooManyFailedScores
from creditflow.monitoring.notices import failure_text, truncations
from creditflow.reports.tables import new_table, results_console, show
from creditflow.reports.text import counted, plain
from creditflow.rewards.manager import ScoringReport, expect_few_failures
from creditflow.rewards.registry import RewardFunction, declared, leaves

if TYPE_CHECKING:
    from creditflow.config import Config
    from creditflow.engines.common.components import Components

TRUTHS_SHOWN = 5
"""Number of unreadable truths that a warning lists."""


def check(
    recipe: Recipe,
    overrides: Overrides = None,
    engine: EngineName = "local",
    tasks: Annotated[int, number_option("--tasks", "Number of tasks to roll out.", 1)] = 4,
    verbose: Annotated[bool, typer.Option("--verbose", help="Also print the resolved configuration.")] = False,
) -> None:
    """Check a recipe on a few tasks, without training.

    Loads every file and model, rolls out the tasks, scores them, assigns credit, and warns of problems.

    Example: creditflow check my_team/recipe.yaml
    """
    from creditflow.config import default_rules, load_recipe

    reporter = Reporter()
    loaded = load_recipe(recipe, overrides or [])
    with reporter.bar(f"loading {loaded.name}", announce=True, keep=False):
        from creditflow.engines.base import find_engine, sampling_engine
        from creditflow.engines.common.components import build_components
        from creditflow.engines.common.guard import build_guard

        chosen = find_engine(engine)
        chosen.expect_trainable(loaded, reporter)
        components = build_components(loaded)
        unreadable = _unreadable_truths(components)
        guard = build_guard(loaded.config, loaded.folder, components.rewards.functions, chosen.name)
    for line in credit_lines(loaded.config):
        reporter.say(line)
    with reporter.bar("check", keep=False):
        result = sampling_engine(chosen).check(components, tasks)
    console, trajectories, report = results_console(), result.trajectories, result.report
    batch = TrajectoryBatch.from_trajectories(trajectories)
    assignment = assign(batch, loaded.config.credit, values_T=result.values_T)

    n = loaded.config.actor_rollout_ref.rollout.n
    show(f"agents, in {counted(len(trajectories) // n, 'task')} x {counted(n, 'rollout')}", _agent_table(assignment))
    show("reward functions", _function_table(components, report))
    console.print(f"validation uses {loaded.validation_words(len(components.val_tasks))}", soft_wrap=True)
    console.print(_fitting_credit(assignment, loaded.config), soft_wrap=True)
    for estimate in result.memory:
        reporter.say(estimate.text())  # to standard error, because the numbers differ at every call
    warnings = _warnings(components, trajectories, report, assignment) + unreadable
    warnings += [f"training would stop: {estimate.problem}" for estimate in result.memory if estimate.problem]
    defaults, rules = default_rules(), loaded.config.guard.rules
    own = [rule for rule in guard.rules if rule.note and rules[rule.name] != defaults.get(rule.name)]
    warnings += [f"guard.rules.{rule.name} only warns: {rule.note}" for rule in own]
    for warning in warnings:
        console.print(f"warning: {plain(warning)}", soft_wrap=True)
    if verbose:
        console.print("\nresolved configuration", style="bold")
        console.print(loaded.to_yaml(), soft_wrap=True)
    try:
        expect_few_failures(report, loaded.config.reward.max_failed_frac)
    except TooManyFailedScores as error:
        raise TooManyFailedScores(f"training would stop: {error}") from None
    verdict = "the recipe can be trained" + (", with the warnings above" if warnings else "")
    nothing = "training would change nothing on these tasks: every advantage is 0"
    reporter.say(verdict if assignment.advantage.learns_S.any() else nothing)


def _fitting_credit(assignment: Assignment, config: Config) -> str:
    """The row of docs/benchmarks/which_credit.md for the scores."""
    scored_S, agent_S = assignment.rewards.scored_S, assignment.batch.agent_of_step
    frozen = {name for name, policy in config.policies.items() if not policy.trained}
    scored_or_frozen = {name for name, agent in config.team.agents.items() if agent.policy in frozen}
    scored_or_frozen |= {assignment.batch.agent_names[i] for i in agent_S[scored_S]}
    unscored = [name for name in assignment.batch.agent_names if name not in scored_or_frozen]
    is_binary = np.isin(assignment.rewards.sub_reward_S[scored_S], (0.0, 1.0)).all()
    noisy, kind = ("noisy", "0 or 1") if is_binary else ("proxies of the outcome, or noisy", "graded")
    row = f"scores of every agent, {kind}: own; with a smaller w_r, such as 0.5, if they are {noisy}"
    if not scored_S.any():
        row = "no scores: own, which gives every step the outcome; choose group_by"
    elif unscored:
        row = f"scores of some agents only, {kind}: own; the outcome alone for {', '.join(unscored)}"
    return f"which credit (docs/benchmarks/which_credit.md): {row}"


def _agent_table(assignment: Assignment) -> Table:
    gate_open_S, rewards, reached = assignment.credit.gate_open_S, assignment.rewards, reach(assignment)
    gates = () if gate_open_S is None else ("gate open",)
    header = ("agent", "steps", "share scored", "failed", "mean sub-reward", *gates, "signal reaches")
    rows: list[list[object]] = []
    for i, agent in enumerate(assignment.batch.agent_names):
        agent_S = assignment.batch.agent_of_step == i
        scored_S, failed_S = agent_S & rewards.scored_S, agent_S & rewards.failed_S
        cells = [agent_S.sum(), _mean(scored_S[agent_S]), failed_S.sum(), _mean(rewards.sub_reward_S[scored_S])]
        cells += [] if gate_open_S is None else [_mean(gate_open_S[scored_S | failed_S])]
        rows.append([agent, *cells, float(reached.get(agent, 0.0))])
    return new_table(header, rows)


def _function_table(components: Components, report: ScoringReport) -> Table:
    pairs = zip(components.rewards.functions, report.functions, strict=True)
    rows = [(n.name, _level(f), f"{f.weight:g}", n.matched, n.failed, float(n.mean)) for f, n in pairs]
    return new_table(("function", "level", "weight", "calls", "failed", "mean"), rows)


def _level(function: RewardFunction) -> str:
    return f"{function.level} ({function.signature})" if function.signature else function.level


def _warnings(
    components: Components, trajectories: Sequence[Trajectory], report: ScoringReport, assignment: Assignment
) -> list[str]:
    """Warnings about the rollouts and their credit, one sentence each."""
    recipe = components.recipe
    warnings = [*recipe.notices, *map(str, lint(assignment))]
    if all(function.level != "outcome" for function in components.rewards.functions):
        names = vars(sys.modules[components.workflow.__module__]).values()
        functions = [f for f in names if type(f) is FunctionType]  # a proxy may raise when its attributes are read
        unlisted = [f.__name__ for f in functions if getattr(declared(f), "level", "") == "outcome"]
        hint = f"; reward.functions does not list {unlisted[0]}, which is declared" if unlisted else ""
        warnings.append(f"no reward function of level outcome: the outcome is 0, and pass@1 means nothing{hint}")
    if (idle := idle_gate(assignment)) is not None and str(idle) not in warnings:
        warnings.append(str(idle))
    warnings += [f"{a} made no step" for a in recipe.config.team.agents if a not in assignment.batch.agent_names]
    if silent := [t for t in trajectories if t.answer is None and not _ERROR_KEYS.intersection(t.info)]:
        warnings.append(
            f"{len(silent)} of {len(trajectories)} trajectories have no answer: the workflow returned None "
            f"({of_function(components.workflow)}); is a `return` missing?"
        )
    warnings += _unfinished_warnings(trajectories, recipe.config.actor_rollout_ref.rollout.n)
    warnings += [cut.text(recipe.config.data.max_response_length) for cut in truncations(assignment.batch)]
    if errors := [str(t.info["agent_error"]) for t in trajectories if "agent_error" in t.info]:
        warnings.append(
            f"in {len(errors)} of {len(trajectories)} trajectories an agent made an error (outcome 0); the first: "
            f"{errors[0]}"
        )
    acted = [step for trajectory in trajectories for step in trajectory.steps if "action" in step.info]
    if replaced := [step for step in acted if "illegal" in step.info]:
        warnings.append(
            f"in {len(replaced)} of {len(acted)} steps of environments the action was illegal, and another was drawn "
            f"in its place; the first: step {replaced[0].id}, {replaced[0].agent}: {replaced[0].info['illegal']}"
        )
    for function in report.functions:
        if function.not_applicable:
            total = function.matched + function.not_applicable
            warnings.append(
                f"reward function {function.name} returned None for {function.not_applicable} of {total} inputs: it "
                "does not apply to them"
            )
        if function.failed:
            warnings.append(failure_text(function))
            warnings += [f"scoring failed: {reason}" for reason in function.reasons[1:]]
    return warnings


def _unreadable_truths(components: Components) -> list[str]:
    """Warnings about ground truths that a reward function cannot read, with their rows."""
    warnings = []
    for function in leaves(components.rewards.functions):
        for kind, tasks in (("training", components.train_tasks), ("validation", components.val_tasks)):
            if reasons := function.unreadable_truths(tasks):
                first = "; ".join(f"row {row}: {reason}" for row, reason in list(reasons.items())[:TRUTHS_SHOWN])
                more = "; ..." if len(reasons) > TRUTHS_SHOWN else ""
                warnings.append(
                    f"reward function {function.name} cannot read the ground truth of {len(reasons)} of {len(tasks)} "
                    f"{kind} tasks, so their scores would fail (rows count from 0): {first}{more}"
                )
    return warnings


_ERROR_KEYS = frozenset(("error", "agent_error", "timed_out", "ended_early"))
"""`info` keys that an interrupted workflow sets."""


def _unfinished_warnings(trajectories: Sequence[Trajectory], n: int) -> list[str]:
    """A sentence for each reason why trajectories failed or were truncated, with their tasks. `n`: rollouts of each.

    Truncated responses are left out: `truncations` names them by agent.
    """
    reasons: dict[tuple[str, str], list[tuple[int, str]]] = defaultdict(list)
    for i, trajectory in enumerate(trajectories):
        status = trajectory.status
        reason = str(trajectory.info.get("error" if status == "failed" else status, "no reason given"))
        if status != "ok" and (status != "truncated" or " was cut off at " not in reason):
            reasons[status, re.sub("[0-9]+", "n", reason.partition(":")[0])].append((i // n, reason))
    return [
        f"{len(cases)} of {len(trajectories)} trajectories {status} (tasks, counted from 0: "
        f"{', '.join(map(str, sorted({task for task, _ in cases})))}); the first: {cases[0][1]}"
        for (status, _), cases in reasons.items()
    ]


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else math.nan
