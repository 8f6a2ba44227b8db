"""`creditflow audit`: compare credit with agents' contributions, measured by rollouts without them."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from creditflow._utils.files import json_ready, make_folder, write_whole
from creditflow._utils.progress import Reporter
from creditflow.config import Recipe, credit_overrides, load_recipe
from creditflow.credit import Assignment, assign
from creditflow.data import Trajectory, TrajectoryBatch
from creditflow.engines.common.components import Components, build_components
from creditflow.engines.local import checkpoint
from creditflow.engines.local.counterfactual import AUDIT, CounterfactualResult, measure
from creditflow.engines.local.policy import Policy, pick_device
from creditflow.engines.local.policy_set import PolicySet
from creditflow.errors import BatchError, ConfigError, InputError
from creditflow.reports.tables import new_table, results_console, show
from creditflow.runs import Ledger, Recorded
from creditflow.studies.audit import Agreement, Measured, Precision, Share, agreement

RULES = ("identical", "none", "discounted", "threshold")
"""Default rules to compare, beside the rule in force."""


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """Options of an audit."""

    step: int | None
    """Training step to audit; None: the one nearest to a checkpoint, the last of several."""
    rollouts: int
    """Maximum rollouts per trajectory."""
    budget: int
    """Maximum rollouts in total."""
    model: Path | None
    """Model folder used for the trained policies; None: the nearest checkpoint."""
    baseline: Path | None
    """Model folder used for agents that are left out; None: the initial model of their policy."""
    rules: tuple[str, ...]
    """Rules to compare, each a rule's name, `key=value` credit options, or both, separated by blanks."""


@dataclass(frozen=True, slots=True)
class _AuditPolicies:
    """Policies that act in the rollouts of an audit."""

    step: int
    checkpoint: int | None
    """Training step of the checkpoint in use; 0: the initial policies; None: the model of `--model`."""
    policy_set: PolicySet
    baselines: Mapping[str, Policy]
    words: str
    """Description of the acting policies, for display."""


def audit(path: Path, asked: AuditOptions, plot: Path | None, out: Path | None, reporter: Reporter) -> None:
    """Roll out the tasks of training step `asked.step` again, print a row per rule, and save the values."""
    for option, file in (("--plot", plot), ("--json", out)):
        if file is not None and not file.parent.is_dir():
            raise ConfigError(f"{option}: {file.parent} is no folder")
    ledger = Ledger.open(path)
    if ledger.run.get("engine") == "none":
        raise InputError(
            f"{path}: was made by `creditflow convert`: there is no workflow that could replay its trajectories"
        )
    rules = _rules(asked.rules)
    recipe = load_recipe(path / "config.yaml")
    components = build_components(recipe, tasks=False)
    cast = _cast(ledger, recipe, asked)
    make_folder(path / "audit", "RUN")  # fails before the rollouts if the folder is not writable
    recorded = ledger.read(cast.step)
    made = _assigned(recorded, rules)
    trajectories = _some(recorded.batch, asked.budget // asked.rollouts)
    reporter.say(f"training step {cast.step}: {len(trajectories)} trajectories, replayed; {cast.words}")
    measured = asyncio.run(_measure(components, cast, trajectories, asked.rollouts, reporter))
    seen = Measured.from_values(recorded.batch, measured.by_id)
    if not len(seen.shapley_X):
        raise InputError(
            f"{path}: no trajectory of training step {cast.step} has an outcome and an agent that is trained"
        )
    found = [agreement(name, assignment, seen) for name, assignment in made.items()]
    precision, per_trajectory = seen.precision, measured.rollouts / max(len(measured.by_id), 1)
    _print(found, seen, measured.rollouts, per_trajectory, cast)
    facts = json_ready(
        {
            "training_step": cast.step,
            "checkpoint": cast.checkpoint,
            "who_answers": cast.words,
            "asked": {**asdict(asked), "model": _text(asked.model), "baseline": _text(asked.baseline)},
            "seed": recipe.config.data.seed,
            "rollouts_failed": measured.failed,
            "reliability": None if precision is None else precision.reliability,
            "is_noise": None if precision is None else precision.is_noise,
            "rules": [{**asdict(one), "options": rules.get(one.rule, {})} for one in found],
            "values": {id: values.to_json() for id, values in measured.by_id.items()},
        }
    )
    kept = path / "audit" / f"{cast.step:06d}.json"
    for file in (kept, *([out] if out is not None else [])):
        write_whole(file, lambda target: target.write_text(json.dumps(facts, indent=1) + "\n"))
    if plot is not None:
        from creditflow.reports.audit_plot import draw_audit

        draw_audit(plot, found)
        reporter.say(f"figure: {plot}")
    results_console().print(f"written: {kept}", soft_wrap=True)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


IN_FORCE = "in force"
"""Display name of the credit recorded in the run."""


def _rules(given: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Credit options of each rule, by display name."""
    found: dict[str, dict[str, Any]] = {}
    for rule in given or RULES:
        words = rule.split()
        if not words:
            raise ConfigError("--rule: expected the name of a rule, or options of credit, got nothing")
        named = words[:1] if "=" not in words[0] else []
        found[rule] = credit_overrides([f"propagation={name}" for name in named] + words[len(named) :])
    return found


def _assigned(recorded: Recorded, rules: Mapping[str, Mapping[str, Any]]) -> dict[str, Assignment]:
    """The recorded assignment, and each rule's assignment of the recorded trajectories."""
    was = recorded.assignment
    if was is None:
        raise InputError(f"training step {recorded.step}: no credit was assigned in it; name another --training-step")
    made = {IN_FORCE: was}
    for name, changed in rules.items():
        options = replace(was.options, shadow=None, **changed)
        options.validate()
        options.refuse_ignored(changed)
        threshold = None if "propagation_threshold" in changed else was.standing_threshold()
        values_T = None if was.critic is None else was.critic.values_T
        try:
            made[name] = assign(recorded.batch, options, values_T=values_T, threshold=threshold)
        except BatchError as error:
            raise InputError(f"--rule {name}: training step {recorded.step}: {error}") from error
    return made


def _cast(ledger: Ledger, recipe: Recipe, asked: AuditOptions) -> _AuditPolicies:
    if not ledger.steps:
        raise InputError(f"{ledger.path}: no training step is on record yet")
    step, saved = (asked.step or ledger.steps[-1], None) if asked.model is not None else _nearest(ledger, asked.step)
    ledger.file(step)
    device = pick_device(recipe.config.trainer.device)
    policy_set = PolicySet.from_recipe(recipe, recipe.config.trainer.total_training_steps or 1, keep_reference=True)
    baselines, stands_in = {name: policy_set.references[name] for name in policy_set.actors}, "what its policy began as"
    if asked.baseline is not None:
        baselines, stands_in = (
            dict.fromkeys(policy_set.actors, Policy.load(asked.baseline, device)),
            str(asked.baseline),
        )
    if asked.model is not None:
        policy_set = replace(
            policy_set,
            policies={**policy_set.policies, **dict.fromkeys(policy_set.actors, Policy.load(asked.model, device))},
        )
    elif saved:
        checkpoint.load(ledger.path, saved, policy_set)
    answers = asked.model or (f"checkpoint {saved}" if saved else "what training began with")
    words = f"{answers} answers anew, and for an agent that is left out answers {stands_in}"
    return _AuditPolicies(step, saved, policy_set, baselines, words)


def _nearest(ledger: Ledger, step: int | None) -> tuple[int, int]:
    """A recorded training step and its nearest checkpoint.

    The policy that sampled training step s is that of checkpoint s - 1.
    """
    saved = [] if ledger.run.get("engine") == "verl" else checkpoint.saved_steps(ledger.path)
    if not saved:
        raise InputError(
            f"{ledger.path}: expected a checkpoint of the embedded engine, found none; name a model with --model, or "
            "train with trainer.save_freq"
        )
    if step is not None:
        return step, min((*saved, 0), key=lambda c: abs(c - step + 1))
    pairs = ((s, c) for s in ledger.steps for c in saved)
    return min(pairs, key=lambda pair: (abs(pair[1] - pair[0] + 1), -pair[0]))


def _some(batch: TrajectoryBatch, count: int) -> list[Trajectory]:
    """At most `count` trajectories, from as many tasks as possible."""
    if count < 1:
        raise InputError("--budget: expected at least --rollouts, the rollouts of one trajectory")
    turn: dict[str, int] = {}
    ranked = []
    for place, trajectory in enumerate(batch.to_trajectories()):
        turn[trajectory.uid] = turn.get(trajectory.uid, -1) + 1
        ranked.append((turn[trajectory.uid], place, trajectory))
    chosen = sorted(ranked, key=lambda one: one[:2])[:count]
    return [trajectory for _, _, trajectory in sorted(chosen, key=lambda one: one[1])]


async def _measure(
    components: Components, cast: _AuditPolicies, trajectories: Sequence[Trajectory], rollouts: int, reporter: Reporter
) -> CounterfactualResult:
    with reporter.bar("counterfactual rollouts", len(trajectories)) as bar:
        shown = 0

        def note(done: int, wanted: int) -> None:
            nonlocal shown
            now = len(trajectories) * done // max(wanted, 1)
            bar.advance(now - shown, f"{done:,} of {wanted:,} rollouts")
            shown = now

        async with components.rewards.open(cast.policy_set.policies):
            return await measure(
                components, cast.policy_set, cast.baselines, trajectories, rollouts, (AUDIT, cast.step), note
            )


def _print(
    found: Sequence[Agreement], seen: Measured, rollouts: int, per_trajectory: float, cast: _AuditPolicies
) -> None:
    console = results_console()
    table = new_table("rule", "credit", "left out", "advantage", "within trajectories")
    for one in found:
        table.add_row(one.rule, *map(_cell, (one.credit, one.left_out, one.advantage, one.within)))
    rows = f"{len(seen.shapley_X):,} agents in trajectories, {rollouts:,} rollouts"
    show(console, f"credit and what agents added to the outcome, training step {cast.step}; {rows}", table)
    agents = new_table("rule", *found[0].by_agent)
    for one in found:
        agents.add_row(one.rule, *map(_cell, one.by_agent.values()))
    show(console, "advantage, among the trajectories of one agent", agents)
    console.print(
        "Spearman's rank correlation [95 %] with Shapley values, of credit and of advantages; left out: of credit with "
        "what leaving the agent out costs; within trajectories: how often, of two agents, the one that added more has "
        "more credit (chance: 0.5).",
        highlight=False,
    )
    if seen.precision is not None:
        console.print(_verdict(seen.precision, per_trajectory), highlight=False)


def _verdict(precision: Precision, per_trajectory: float) -> str:
    """Describe whether the measured values can separate rules. `per_trajectory`: rollouts per trajectory."""
    if not precision.is_noise:
        return (
            f"{precision.reliability:.0%} of the variance of these values is real, the rest is measurement error: no "
            f"rule can correlate with them by more than about {math.sqrt(precision.reliability):.2f}."
        )
    wanted = precision.sufficient_factor * per_trajectory
    enough = (
        f"At least {math.ceil(wanted):,} rollouts per trajectory make half of their variance real: --rollouts "
        f"{math.ceil(wanted)}, with a --budget to match"
        if math.isfinite(wanted)
        else "Their spread is below their measurement error, so no sufficient number can be derived: choose another "
        "--training-step, or another --model"
    )
    return (
        f"These values are noise at {per_trajectory:.0f} rollouts per trajectory: do not compare rules on this "
        f"training step. {enough}."
    )


def _cell(share: Share) -> str:
    if math.isnan(share.value):
        return "-"
    value, low, high = (f"{one:.2f}".replace("0.", ".", 1) for one in (share.value, share.low, share.high))
    return value if math.isnan(share.low) else f"{value} [{low}, {high}]"
