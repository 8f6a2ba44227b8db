"""`creditflow audit`: whether credit went to the agents that made the difference, by playing without them."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from creditflow.audit import Agreement, Measured, Share, agreement
from creditflow.commands.recredit import thresholds_on_record
from creditflow.config import Recipe, credit_overrides, load_recipe
from creditflow.credit import CreditOptions, assign
from creditflow.credit.shapley import KEY
from creditflow.engines.local import checkpoint
from creditflow.engines.local.counterfactual import add_values
from creditflow.engines.local.crew import Crew
from creditflow.engines.local.policy import Policy, pick_device
from creditflow.errors import BatchError, ConfigError, InputError
from creditflow.files import json_ready, write_whole
from creditflow.ledger import Ledger, Recorded
from creditflow.parts import Parts, build_parts
from creditflow.progress import Reporter
from creditflow.report.tables import new_table, results_console, show
from creditflow.report.text import number
from creditflow.trajectory import Trajectory, TrajectoryBatch

RULES = ("identical", "none", "discounted", "threshold")
"""What is compared unless it is said otherwise, beside the rule that was in force."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What an audit is to do."""

    step: int | None
    """The training step whose plays are looked at; None: the last one that a checkpoint is near."""
    plays: int
    """For each trajectory, at most."""
    budget: int
    """In all, at most."""
    model: Path | None
    """Who answers anew for the trained policies; None: the nearest checkpoint."""
    baseline: Path | None
    """Who stands in for agents; None: what their policies began as."""
    rules: tuple[str, ...]
    """Each the name of a rule, or `key=value` options of credit, separated by blanks."""


@dataclass(frozen=True, slots=True)
class _Cast:
    """Who plays."""

    step: int
    policies: Mapping[str, Policy]
    baselines: Mapping[str, Policy]
    words: str
    """Whose answers these are, for people."""


def audit(path: Path, asked: Asked, plot: Path | None, out: Path | None, reporter: Reporter) -> None:
    """Play again what training step `asked.step` played, print a row for each rule, and keep the values."""
    for option, file in (("--plot", plot), ("--json", out)):
        if file is not None and not file.parent.is_dir():
            raise ConfigError(f"{option}: {file.parent} is no folder")
    ledger = Ledger.open(path)
    options = _rules(asked.rules)
    recipe = load_recipe(path / "config.yaml")
    parts = build_parts(recipe, tasks=False)
    cast = _cast(ledger, recipe, asked)
    recorded = ledger.read(cast.step)
    if recorded.assignment is None:
        raise InputError(f"{path}: no credit was assigned in training step {cast.step}; name another --training-step")
    trajectories = _some(recorded.batch, asked.budget // max(asked.plays, 1))
    for changed in options.values():  # or say now what cannot be, not after the plays
        replace(recorded.assignment.options, shadow=None, **changed).validate()
    reporter.say(f"training step {cast.step}: {len(trajectories)} plays again; {cast.words}")
    made = asyncio.run(_measure(parts, cast, trajectories, asked, reporter))
    by_id = {trajectory.id: trajectory for trajectory in trajectories}
    every = recorded.batch.to_trajectories()
    batch = TrajectoryBatch.from_trajectories([by_id.get(one.id, one) for one in every])
    seen = Measured.of(batch)
    if not len(seen.shapley_X):
        raise InputError(f"{path}: no play of training step {cast.step} has an outcome and an agent that is trained")
    found = [agreement(name, _assigned(recorded, batch, changed), seen) for name, changed in options.items()]
    _print(found, seen, made, cast)
    facts = _facts(found, seen, trajectories, cast, asked, recipe)
    kept = path / "audit" / f"{cast.step:06d}.json"
    kept.parent.mkdir(exist_ok=True)
    for file in (kept, *([out] if out is not None else [])):
        write_whole(file, lambda target: target.write_text(json.dumps(facts, indent=1) + "\n"))
    if plot is not None:
        from creditflow.report.audit_plot import draw_audit

        draw_audit(plot, found)
        reporter.say(f"figure: {plot}")
    results_console().print(f"written: {kept}", soft_wrap=True)


def _rules(given: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Options of credit by the name that a rule is shown under; the one in force first."""
    found: dict[str, dict[str, Any]] = {"in force": {}}
    for rule in given or RULES:
        words = rule.split()
        named = words[:1] if words and "=" not in words[0] else []
        found[rule] = credit_overrides([f"propagation={name}" for name in named] + words[len(named) :])
    return found


def _cast(ledger: Ledger, recipe: Recipe, asked: Asked) -> _Cast:
    device = pick_device(recipe.config.trainer.device)
    crew = Crew.of(recipe, recipe.config.trainer.total_training_steps or 1, keep_reference=True)
    baselines = {name: crew.references[name] for name in crew.actors}
    words = "for an agent that is left out answers what its policy began as"
    if asked.baseline is not None:
        one = Policy.load(asked.baseline, device)
        baselines = dict.fromkeys(crew.policies, one)
        words = f"for an agent that is left out answers {asked.baseline}"
    if asked.model is not None:
        if asked.step is None and not ledger.steps:
            raise InputError(f"{ledger.path}: no training step is on record yet")
        one = Policy.load(asked.model, device)
        policies = {name: one if name in crew.actors else policy for name, policy in crew.policies.items()}
        return _Cast(asked.step or ledger.steps[-1], policies, baselines, f"{asked.model} answers anew, and {words}")
    step, saved = _nearest(ledger, asked.step)
    checkpoint.load(ledger.path, saved, crew)
    return _Cast(step, crew.policies, baselines, f"checkpoint {saved} answers anew, and {words}")


def _nearest(ledger: Ledger, step: int | None) -> tuple[int, int]:
    """A training step on record, and the checkpoint nearest to the policy that played it: that of the step before."""
    saved = checkpoint.saved_steps(ledger.path)
    if not saved:
        raise InputError(
            f"{ledger.path}: expected a checkpoint of the embedded engine, found none; name a model with --model, or "
            "train with trainer.save_freq"
        )
    if step is None and not ledger.steps:
        raise InputError(f"{ledger.path}: no training step is on record yet")
    steps = ledger.steps if step is None else (step,)
    return min(((s, c) for s in steps for c in saved), key=lambda pair: (abs(pair[1] - pair[0] + 1), -pair[0]))


def _some(batch: TrajectoryBatch, count: int) -> list[Trajectory]:
    """At most so many plays, of as many tasks as there are."""
    if count < 1:
        raise InputError("--budget: expected at least as many plays as --plays gives one trajectory")
    turn: dict[str, int] = {}
    ranked = []
    for place, trajectory in enumerate(batch.to_trajectories()):
        turn[trajectory.uid] = turn.get(trajectory.uid, -1) + 1
        ranked.append((turn[trajectory.uid], place, trajectory))
    chosen = sorted(ranked, key=lambda one: one[:2])[:count]
    return [trajectory for _, _, trajectory in sorted(chosen, key=lambda one: one[1])]


async def _measure(
    parts: Parts, cast: _Cast, trajectories: Sequence[Trajectory], asked: Asked, reporter: Reporter
) -> int:
    with reporter.bar("play again", len(trajectories)) as bar:
        shown = 0

        def note(done: int, wanted: int) -> None:
            nonlocal shown
            now = len(trajectories) * done // max(wanted, 1)
            bar.advance(now - shown, f"{done:,} of {wanted:,} plays")
            shown = now

        async with parts.rewards.open(cast.policies):
            return await add_values(parts, cast.policies, cast.baselines, trajectories, asked.plays, (cast.step,), note)


def _assigned(recorded: Recorded, batch: TrajectoryBatch, changed: Mapping[str, Any]) -> Any:
    was = recorded.assignment
    assert was is not None
    options: CreditOptions = replace(was.options, shadow=None, **changed)
    threshold = None if "propagation_threshold" in changed else thresholds_on_record(was)
    values_T = None if was.critic is None else was.critic.values_T
    try:
        return assign(batch, options, values_T=values_T, threshold=threshold)
    except BatchError as error:
        raise InputError(f"training step {recorded.step}: {error}") from error


def _print(found: Sequence[Agreement], seen: Measured, plays: int, cast: _Cast) -> None:
    console = results_console()
    agents = list(found[0].by_agent)
    table = new_table("rule", "credit", "advantage", *agents, "within plays", "left out")
    for one in found:
        shares = (one.credit, one.advantage, *one.by_agent.values(), one.within, one.left_out)
        table.add_row(one.rule, *map(_cell, shares))
    rows = f"{len(seen.shapley_X):,} agents in plays, {plays:,} plays again"
    show(console, f"credit and what agents added to the outcome, training step {cast.step}; {rows}", table)
    console.print(
        "Spearman's rank correlation [95 %] with Shapley values: of credit; of advantages, all and among the plays of "
        "one agent;\nwithin plays: how often, of two agents, the one that added more has more credit (chance: 0.5); "
        "left out: of credit with what leaving the agent out costs.",
        highlight=False,
    )
    if not math.isnan(seen.reliability):
        top = math.sqrt(seen.reliability)
        console.print(
            f"{seen.reliability:.0%} of the values' variance is no error of measurement: about {top:.2f} is the most "
            "that a rule could reach.",
            highlight=False,
        )


def _cell(share: Share) -> str:
    if math.isnan(share.value):
        return "-"
    interval = "" if math.isnan(share.low) else f" [{share.low:.2f}, {share.high:.2f}]"
    return f"{number(share.value, 2)}{interval}"


def _facts(
    found: Sequence[Agreement],
    seen: Measured,
    trajectories: Sequence[Trajectory],
    cast: _Cast,
    asked: Asked,
    recipe: Recipe,
) -> dict[str, Any]:
    """All that it takes to do it again, and what came of it."""
    facts = {
        "training_step": cast.step,
        "who_answers": cast.words,
        "seed": recipe.config.data.seed,
        "plays_of_each": asked.plays,
        "reliability": seen.reliability,
        "rules": [asdict(one) for one in found],
        "values": {one.id: one.info[KEY] for one in trajectories if KEY in one.info},
    }
    return dict(json_ready(facts))
