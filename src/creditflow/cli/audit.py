"""`creditflow audit`: compare credit with measured contributions: those of agents, or those of single decisions."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from creditflow._utils.files import make_folder, write_json
from creditflow._utils.progress import Reporter
from creditflow.cli._decisions import DecisionOptions, imported_audit, run_audit, trained_run_audit
from creditflow.cli._options import JsonFile, Overrides, PlotFile, expect_parent_folders
from creditflow.credit import Assignment
from creditflow.credit.analysis.fidelity import Precision, Share
from creditflow.credit.trees import rollouts_of
from creditflow.data import Trajectory, TrajectoryBatch
from creditflow.errors import ConfigError, InputError
from creditflow.reports.tables import new_table, results_console, show
from creditflow.runs import Ledger, Recorded
from creditflow.studies.audit import Agreement, Measured, agreement

if TYPE_CHECKING:
    from creditflow.config import Recipe
    from creditflow.engines.common.components import Components
    from creditflow.engines.local.counterfactual import CounterfactualResult
    from creditflow.engines.local.policy import Policy
    from creditflow.engines.local.policy_set import PolicySet

_CONTINUATIONS, _TOP = 8, 20
IN_FORCE = "in force"
"""Display name of the credit recorded in the run."""


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
    actor: str
    """The acting policies, for display."""
    description: str
    """The acting policies and the baselines, for display."""


def audit(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a run, or a Parquet file of imported trajectories.")
    ],
    overrides: Overrides = None,
    *,
    decisions: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Measure up to this many single decisions instead of agents' contributions; default for imported "
            "trajectories: all.",
        ),
    ] = None,
    continuations: Annotated[
        int | None,
        typer.Option(
            min=2, help="Continuations with a decision, and as many with the decision sampled anew; default: 8."
        ),
    ] = None,
    top: Annotated[int | None, typer.Option(min=0, help="Number of decisions to print; default: 20.")] = None,
    recipe: Annotated[
        str | None, typer.Option(metavar="RECIPE", help="The recipe with the workflow of imported trajectories.")
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="An OpenAI-compatible endpoint that acts for every agent of these."),
    ] = None,
    served_model: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model's name as the server of --endpoint knows it.")
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="The environment variable with the key of --endpoint.")
    ] = None,
    outcome: Annotated[
        str | None,
        typer.Option(metavar="FN", help="The outcome function of --endpoint without --recipe."),
    ] = None,
    training_step: Annotated[
        int | None,
        typer.Option(
            min=1, help="The training step to audit; default: the one nearest to a checkpoint, the last of several."
        ),
    ] = None,
    rollouts: Annotated[int, typer.Option(min=1, help="Maximum rollouts per trajectory.")] = 28,
    budget: Annotated[int, typer.Option(min=1, help="Maximum rollouts in total.")] = 4000,
    rule: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE",
            help="A rule to compare: its name, or credit options in quotes; may be repeated. "
            "Default: the rules with a comparison rank.",
        ),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Model of the trained policies; default: the checkpoint.")
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Model that replaces an agent; default: the initial model of its policy."),
    ] = None,
    plot: PlotFile = None,
    json: JsonFile = None,
) -> None:
    """Measure how faithful credit is.

    Rolls out the tasks of a training step again without each agent, and prints one row per rule. With --decisions, or
    for imported trajectories, continues trajectories with and without single steps, and prints those that mattered.
    """
    options = AuditOptions(training_step, rollouts, budget, model, baseline, tuple(rule or ()))
    expect_parent_folders(plot=plot, json=json)
    of_decisions = DecisionOptions(
        decisions,
        _CONTINUATIONS if continuations is None else continuations,
        recipe,
        tuple(overrides or ()),
        endpoint,
        served_model,
        api_key_env,
        outcome,
        _TOP if top is None else top,
    )
    imported = run.suffix == ".parquet" or (
        (run / "run.json").is_file() and Ledger.open(run).run.get("engine") == "none"
    )
    if not imported:
        _expect_none(
            "is for imported trajectories (a Parquet file); a run has its own recipe",
            {
                "--recipe": recipe,
                "--endpoint": endpoint,
                "--served-model": served_model,
                "--api-key-env": api_key_env,
                "--outcome": outcome,
                "KEY=VALUE": overrides or None,
            },
        )
    if imported or decisions is not None:
        _expect_none("is for agents' contributions, not for decisions", {"--baseline": baseline, "--plot": plot})
    else:
        _expect_none("is for decisions (--decisions)", {"--continuations": continuations, "--top": top})
    if imported:
        _audit_imported(run, options, of_decisions, json)
    elif decisions is None:
        _audit_agents(run, options, plot, json)
    else:
        _audit_decisions(run, options, of_decisions, json)


def _expect_none(reason: str, options: Mapping[str, object]) -> None:
    """Raise ConfigError with the reason for the first option that was given."""
    if given := [name for name, value in options.items() if value is not None]:
        raise ConfigError(f"{given[0]}: {reason}")


def _audit_agents(run: Path, options: AuditOptions, plot: Path | None, json: Path | None) -> None:
    from creditflow.config import load_recipe

    reporter = Reporter()
    ledger = Ledger.open(run)
    rollouts, budget = options.rollouts, options.budget
    rules = _rules(options.rules)
    recipe = load_recipe(run / "config.yaml")
    with reporter.bar(f"loading {run}", announce=True, keep=False):
        from creditflow.engines.common.components import build_components

        components = build_components(recipe, tasks=False)
        policies = _load_policies(ledger, recipe, options)
    make_folder(run / "audit", "RUN")  # fails before the rollouts if the folder is not writable
    recorded = ledger.read(policies.step)
    assignments = _assignments(recorded, rules, options.rules, reporter)
    trajectories = _spread_over_tasks(recorded.batch, budget // rollouts)
    reporter.say(f"training step {policies.step}: {len(trajectories)} trajectories replayed; {policies.description}")
    result = asyncio.run(_measure(components, policies, trajectories, rollouts, reporter))
    measured = Measured.from_values(recorded.batch, result.by_id)
    if not len(measured.shapley_X):
        raise InputError(
            f"{run}: no trajectory of training step {policies.step} has an outcome and an agent that is trained"
        )
    agreements = [agreement(name, assignment, measured) for name, assignment in assignments.items()]
    precision, per_trajectory = measured.precision, result.rollouts / max(len(result.by_id), 1)
    _print(agreements, measured, result.rollouts, per_trajectory, policies)
    facts = {
        "training_step": policies.step,
        "checkpoint": policies.checkpoint,
        "policies": policies.description,
        "options": asdict(options),
        "seed": recipe.config.data.seed,
        "rollouts_failed": result.failed,
        "reliability": None if precision is None else precision.reliability,
        "is_noise": None if precision is None else precision.is_noise,
        "rules": [{**asdict(row), "options": rules.get(row.rule, {})} for row in agreements],
        "values": {id: values.to_json() for id, values in result.by_id.items()},
    }
    audit_file = run / "audit" / f"{policies.step:06d}.json"
    write_json(audit_file, facts)
    if json is not None:
        write_json(json, facts)
    if plot is not None:
        from creditflow.reports.audit_plot import draw_audit

        draw_audit(plot, agreements)
        reporter.say(f"figure: {plot}")
    results_console().print(f"written: {audit_file}", soft_wrap=True)


def _audit_decisions(run: Path, options: AuditOptions, of_decisions: DecisionOptions, json: Path | None) -> None:
    from creditflow.config import load_recipe

    reporter, ledger, rules = Reporter(), Ledger.open(run), _rules(options.rules)
    recipe = load_recipe(run / "config.yaml")
    with reporter.bar(f"loading {run}", announce=True, keep=False):
        from creditflow.engines.common.components import build_components

        components = build_components(recipe, tasks=False)
        policies = _load_policies(ledger, recipe, options)
    make_folder(run / "audit", "RUN")  # fails before the rollouts if the folder is not writable
    recorded = ledger.read(policies.step)
    assignments = _assignments(recorded, rules, options.rules, reporter)
    audited = trained_run_audit(
        recorded.batch,
        assignments,
        assignments[IN_FORCE],
        components,
        policies.policy_set,
        policies.step,
        f"{policies.actor} acts",
    )
    facts = {"training_step": policies.step, "checkpoint": policies.checkpoint}
    facts |= run_audit(audited, of_decisions, reporter)
    audit_file = run / "audit" / f"{policies.step:06d}_decisions.json"
    for file in (audit_file, *([json] if json is not None else [])):
        write_json(file, facts)
    results_console().print(f"written: {audit_file}", soft_wrap=True)


def _audit_imported(source: Path, options: AuditOptions, of_decisions: DecisionOptions, json: Path | None) -> None:
    from creditflow.data import read_parquet

    reporter, rules = Reporter(), _rules(options.rules)
    if source.suffix == ".parquet":
        batch = read_parquet(source)
    else:
        ledger = Ledger.open(source)
        if not ledger.steps:
            raise InputError(f"{source}: expected recorded trajectories, found none")
        batch = ledger.read(options.step or ledger.steps[-1]).batch
    facts = run_audit(
        imported_audit(source, batch, of_decisions, rules, options.model, reporter), of_decisions, reporter
    )
    if json is not None:
        write_json(json, facts)


def _rules(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Credit options of each rule, by display name."""
    from creditflow.config import credit_overrides
    from creditflow.credit.records import compared_rules

    rules: dict[str, dict[str, Any]] = {}
    for text in texts or compared_rules():
        words = text.split()
        if not words:
            raise ConfigError("--rule: expected the name of a rule, or options of credit, got nothing")
        names = words[:1] if "=" not in words[0] else []
        rules[text] = credit_overrides([f"propagation={name}" for name in names] + words[len(names) :])
    return rules


def _assignments(
    recorded: Recorded, rules: Mapping[str, Mapping[str, Any]], given: Sequence[str], reporter: Reporter
) -> dict[str, Assignment]:
    """The recorded assignment, and each rule's assignment of the recorded trajectories.

    `given`: the rules of the command line. A rule that is compared by default is left out if it contradicts the
    recorded options.
    """
    from creditflow.studies.reassignment import reassign

    if recorded.assignment is None:
        raise InputError(f"training step {recorded.step}: no credit was assigned in it; name another --training-step")
    assignments = {IN_FORCE: recorded.assignment}
    for name, changed in rules.items():
        try:
            assignments[name] = reassign(recorded, changed, f"--rule {name}: training step {recorded.step}")
        except ConfigError as error:
            if given:
                raise
            reporter.say(f"{name} is left out: {error}")
    return assignments


def _load_policies(ledger: Ledger, recipe: Recipe, options: AuditOptions) -> _AuditPolicies:
    from creditflow.engines.local import checkpoint
    from creditflow.engines.local.policy import Policy, pick_device
    from creditflow.engines.local.policy_set import PolicySet

    if not ledger.steps:
        raise InputError(f"{ledger.path}: expected recorded training steps, found none")
    step, saved = (
        (options.step or ledger.steps[-1], None) if options.model is not None else _nearest(ledger, options.step)
    )
    ledger.file(step)
    device = pick_device(recipe.config.trainer.device)
    policy_set = PolicySet.from_recipe(recipe, recipe.config.trainer.total_training_steps or 1, keep_reference=True)
    baselines = {name: policy_set.references[name] for name in policy_set.actors}
    if options.baseline is not None:
        baselines = dict.fromkeys(policy_set.actors, Policy.load(options.baseline, device))
    if options.model is not None:
        policy_set = replace(
            policy_set,
            policies={**policy_set.policies, **dict.fromkeys(policy_set.actors, Policy.load(options.model, device))},
        )
    elif saved:
        checkpoint.load(ledger.path, saved, policy_set)
    actor = str(options.model or (f"checkpoint {saved}" if saved else "the initial model"))
    description = f"{actor} acts, and {options.baseline or 'the initial model of its policy'} replaces an agent"
    return _AuditPolicies(step, saved, policy_set, baselines, actor, description)


def _nearest(ledger: Ledger, step: int | None) -> tuple[int, int]:
    """A recorded training step and its nearest checkpoint.

    The policy that sampled training step s is that of checkpoint s - 1.
    """
    from creditflow.engines.common.checkpoints import saved_steps
    from creditflow.engines.local.run import NAME

    saved = saved_steps(ledger.path) if ledger.run.get("engine", NAME) == NAME else []
    if not saved:
        raise InputError(
            f"{ledger.path}: expected a checkpoint of the embedded engine, found none; name a model with --model, or "
            "train with trainer.save_freq"
        )
    if step is not None:
        return step, min((*saved, 0), key=lambda c: abs(c - step + 1))
    pairs = ((s, c) for s in ledger.steps for c in saved)
    return min(pairs, key=lambda pair: (abs(pair[1] - pair[0] + 1), -pair[0]))


def _spread_over_tasks(batch: TrajectoryBatch, count: int) -> list[Trajectory]:
    """At most `count` rollouts, from as many tasks as possible; no branches."""
    if count < 1:
        raise InputError("--budget: expected at least --rollouts, the rollouts of one trajectory")
    rank: dict[str, int] = {}
    ranked = []
    rollouts = np.flatnonzero(rollouts_of(batch)).tolist()
    trajectories = batch.to_trajectories()
    for index, trajectory in ((n, trajectories[n]) for n in rollouts):
        rank[trajectory.uid] = rank.get(trajectory.uid, -1) + 1
        ranked.append((rank[trajectory.uid], index, trajectory))
    chosen = sorted(ranked, key=lambda item: item[:2])[:count]
    return [trajectory for _, _, trajectory in sorted(chosen, key=lambda item: item[1])]


async def _measure(
    components: Components,
    policies: _AuditPolicies,
    trajectories: Sequence[Trajectory],
    rollouts: int,
    reporter: Reporter,
) -> CounterfactualResult:
    from creditflow.engines.local.counterfactual import AUDIT, measure

    with reporter.bar("counterfactual rollouts", len(trajectories)) as bar:
        shown = 0

        def note(done: int, total: int) -> None:
            nonlocal shown
            now = len(trajectories) * done // max(total, 1)
            bar.advance(now - shown, f"{done:,} of {total:,} rollouts")
            shown = now

        async with components.rewards.open(policies.policy_set.policies):
            return await measure(
                components,
                policies.policy_set,
                policies.baselines,
                trajectories,
                rollouts,
                (AUDIT, policies.step),
                note,
            )


def _print(
    agreements: Sequence[Agreement], measured: Measured, rollouts: int, per_trajectory: float, policies: _AuditPolicies
) -> None:
    header = ("rule", "credit", "left out", "advantage", "within trajectories")
    rows = [(row.rule, *map(_cell, (row.credit, row.left_out, row.advantage, row.within))) for row in agreements]
    counts = f"{len(measured.shapley_X):,} agents in trajectories, {rollouts:,} rollouts"
    title = f"credit and agents' contributions to the outcome, training step {policies.step}; {counts}"
    show(title, new_table(header, rows))
    by_agent = [(row.rule, *map(_cell, row.by_agent.values())) for row in agreements]
    show("advantage, among the trajectories of one agent", new_table(("rule", *agreements[0].by_agent), by_agent))
    console = results_console()
    console.print(
        "credit, advantage: Spearman's rank correlation [95 %] with Shapley values. left out: the same of credit with "
        "the loss of outcome without the agent. within trajectories: how often, of two agents, the one that added more "
        "has more credit (chance: 0.5)."
    )
    if measured.precision is not None:
        console.print(_verdict(measured.precision, per_trajectory))


def _verdict(precision: Precision, per_trajectory: float) -> str:
    """Describe whether the measured values can separate rules. `per_trajectory`: rollouts per trajectory."""
    if not precision.is_noise:
        return (
            f"{precision.reliability:.0%} of the variance of these values is real, the rest is measurement error: no "
            f"rule can correlate with them by more than about {math.sqrt(precision.reliability):.2f}."
        )
    needed = precision.sufficient_factor * per_trajectory
    advice = (
        f"At least {math.ceil(needed):,} rollouts per trajectory make half of their variance real: --rollouts "
        f"{math.ceil(needed)}, with a --budget to match"
        if math.isfinite(needed)
        else "Their spread is below their measurement error, so no sufficient number can be derived: choose another "
        "--training-step, or another --model"
    )
    return (
        f"These values are noise at {per_trajectory:.0f} rollouts per trajectory: do not compare rules on this "
        f"training step. {advice}."
    )


def _cell(share: Share) -> str:
    if math.isnan(share.value):
        return "-"
    value, low, high = (f"{x:.2f}".replace("0.", ".", 1) for x in (share.value, share.low, share.high))
    return value if math.isnan(share.low) else f"{value} [{low}, {high}]"
