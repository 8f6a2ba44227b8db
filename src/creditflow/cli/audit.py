"""`creditflow audit`: compare credit with the measured values of single decisions."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from creditflow._utils.files import make_folder, write_json, write_named
from creditflow._utils.progress import Reporter
from creditflow.cli._options import JsonFile, Run, make_json_folder, number_option
from creditflow.credit import Assignment
from creditflow.engines.local.values import Share
from creditflow.errors import ConfigError, InputError
from creditflow.reports.tables import new_table, results_console, show
from creditflow.reports.text import number
from creditflow.runs import Ledger, Recorded
from creditflow.studies.decisions import FALSE_DISCOVERIES, DecisionRow, RuleFidelity, decision_rows, rule_fidelities

if TYPE_CHECKING:
    from creditflow.engines.common.components import Components
    from creditflow.engines.local.decisions import MeasuredDecisions
    from creditflow.engines.local.policy_set import PolicySet

IN_FORCE = "in force"
"""Display name of the credit recorded in the run."""


def audit(
    run: Run,
    *,
    decisions: Annotated[int, number_option("--decisions", "Maximum number of decisions, drawn at random.", 1)] = 200,
    continuations: Annotated[
        int, number_option("--continuations", "Continuations with a decision, and with it anew; a ceiling needs 4.", 2)
    ] = 8,
    top: Annotated[int, number_option("--top", "Number of decisions to print.", 0)] = 20,
    rule: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE",
            help="A rule to compare: its name, or credit options in quotes; may be repeated. "
            "Default: the rules with a comparison rank.",
        ),
    ] = None,
    training_step: Annotated[
        int | None, number_option("--training-step", "The step to audit; default: the last nearest to a checkpoint.", 1)
    ] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Model of the trained policies; default: the checkpoint.")
    ] = None,
    json: JsonFile = None,
) -> None:
    """Measure how faithful credit is.

    Continues the trajectories of a training step with and without single steps. Prints the steps that mattered, and
    one row per rule.

    Example: creditflow audit runs/RUN --rule own --rule identical
    """
    from creditflow.config import load_recipe, trained_agents
    from creditflow.engines.common.components import build_components
    from creditflow.engines.local.decisions import (
        DECISION_AUDIT,
        MeasuringRollouts,
        choose_decisions,
        measure_decisions,
    )
    from creditflow.engines.local.fidelity import decision_candidates

    make_json_folder(json)
    reporter, ledger, rules = Reporter(), Ledger.open(run), _rules(rule or ())
    if ledger.run.get("engine") == "none":
        raise InputError(f"{run}: expected a run that creditflow trained; imported trajectories cannot be continued")
    with reporter.bar(f"loading {run}", announce=True, keep=False):
        components = build_components(load_recipe(run / "config.yaml", recorded=ledger.run), tasks=False)
        step, checkpoint, policy_set = _load_policies(ledger, components, training_step, model, reporter)
    make_folder(run / "audit", "RUN")  # fails before the rollouts if the folder is not writable
    recorded = ledger.read(step)
    assignments = _assignments(ledger, recorded, rules, reporter, is_default=not rule)
    batch, trained, config = recorded.batch, assignments[IN_FORCE], components.recipe.config

    candidate_S = decision_candidates(trained, trained_agents(config))
    if not candidate_S.any():
        raise InputError(f"training step {step}: {_SKIPPED.format(batch.n_steps)}")
    key = (DECISION_AUDIT, step)
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((config.data.seed, *key))))
    chosen = choose_decisions(batch, candidate_S, continuations, decisions, math.inf, rng)
    title = f"training step {step}; {model or (f'checkpoint {checkpoint}' if checkpoint else 'the initial model')} acts"
    reporter.say(
        f"{title}: {len(chosen.step_D):,} of {batch.n_steps:,} decisions, {continuations} continuations of each prefix"
    )

    async def measure() -> MeasuredDecisions:
        with reporter.bar("continuations", unit="rollouts") as bar:
            async with components.rewards.open(policy_set.policies):
                rollouts, trajectories = MeasuringRollouts(components, policy_set), batch.to_trajectories()
                return await measure_decisions(rollouts, batch, trajectories, chosen, continuations, key, bar.reach)

    measured = asyncio.run(measure())
    measured.expect_few_failures(config.actor_rollout_ref.rollout.max_failed_frac)
    rows = decision_rows(batch, chosen.step_D, measured.values, trained)
    fidelities = rule_fidelities(assignments, chosen.step_D, measured.values)
    skipped = int(np.count_nonzero(~candidate_S))
    _print_decisions(title, rows, top)
    _print_rules(fidelities, measured, skipped)
    facts = {
        "training_step": step,
        "checkpoint": checkpoint,
        "title": title,
        "decisions_asked": decisions,
        "continuations_of_each": continuations,
        "seed": config.data.seed,
        "probability": chosen.probability,
        **{name: getattr(measured, name) for name in ("tokens", "continuations", "refused", "first_refusal", "failed")},
        "not_auditable": skipped,
        "rules": [asdict(fidelity) for fidelity in fidelities],
        "decisions": [asdict(row) for row in rows],
    }
    file = run / "audit" / f"{step:06d}.json"
    write_json(file, facts)
    results_console().print(f"written: {file}", soft_wrap=True)
    if json is not None:
        write_named(json, lambda aside: write_json(aside, facts), "--json")


_SKIPPED = "{:,} steps cannot be audited: they are not trained, or their outcome is unknown"


def _rules(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Credit options of each rule, by display name."""
    from creditflow.config import credit_overrides
    from creditflow.credit.records import compared_rules

    rules: dict[str, dict[str, Any]] = {}
    for text in texts or compared_rules():
        words = re.split(r"\s+(?=[\w.]+=)", text.strip())  # a value may have blanks, as `{rule: own, w_r: 2}` does
        if not words[0]:
            raise ConfigError("--rule: expected the name of a rule, or options of credit, got nothing")
        rules[text] = credit_overrides(words if "=" in words[0] else [f"propagation={words[0]}", *words[1:]])
    return rules


def _assignments(
    ledger: Ledger, recorded: Recorded, rules: Mapping[str, Mapping[str, Any]], reporter: Reporter, *, is_default: bool
) -> dict[str, Assignment]:
    """The recorded assignment, and each rule's assignment of the recorded trajectories, adapted as in `recredit`.

    A rule that is compared by default is left out if it contradicts the recorded options.
    """
    from creditflow.studies.reassignment import reassigned_step

    if recorded.assignment is None:
        raise InputError(f"training step {recorded.step}: no credit was assigned in it; name another --training-step")
    assignments = {IN_FORCE: recorded.assignment}
    for name, changed in rules.items():
        try:
            assignments[name] = reassigned_step(ledger, recorded, changed)
        except InputError as error:
            if not (is_default and isinstance(error, ConfigError)):
                raise InputError(f"--rule {name}: {error}") from error
            reporter.say(f"{name} is left out: {error}")
    return assignments


def _load_policies(
    ledger: Ledger, components: Components, training_step: int | None, model: Path | None, reporter: Reporter
) -> tuple[int, int | None, PolicySet]:
    """(training step, checkpoint, policies) of an audit.

    The checkpoint is the training step of the one in use; 0: the initial policies; None: the model of `--model`.
    """
    from creditflow.engines.local import checkpoint
    from creditflow.engines.local.policy import Policy, pick_device
    from creditflow.engines.local.policy_set import PolicySet

    if not ledger.steps:
        raise InputError(f"{ledger.path}: expected recorded training steps, found none")
    step, saved = (training_step or ledger.steps[-1], None) if model else _nearest(ledger, training_step)
    ledger.file(step)
    if saved is not None and saved != step - 1:
        other = f"warning: checkpoint {saved} acts, and not the policy that sampled training step {step}"
        reporter.say(f"{other}; name another --training-step, or train with a smaller trainer.save_freq")
    recipe = components.recipe
    trainer, keeps = recipe.config.trainer, components.rewards.needs_reference
    policy_set = PolicySet.from_recipe(recipe, trainer.total_training_steps or 1, keep_reference=keeps)
    if model is not None:
        loaded = Policy.load(model, pick_device(trainer.device))
        policy_set = replace(policy_set, policies={**policy_set.policies, **dict.fromkeys(policy_set.actors, loaded)})
    elif saved:
        checkpoint.load(ledger.path, saved, policy_set)
    return step, saved, policy_set


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


def _print_decisions(title: str, rows: Sequence[DecisionRow], top: int) -> None:
    signed = partial(number, signed=True)
    header = ("step", "agent", "agrees", "advantage", "selecting", "confirmed", "confirmed error")
    cells = [
        (r.step_id, r.agent, r.agrees, *map(signed, (r.advantage, r.selecting, r.confirmed)), r.confirmed_error)
        for r in [row for row in rows if math.isfinite(row.value)][:top]
    ]
    show(f"decisions with the largest selecting values, {title}", new_table(header, cells))
    results_console().print(
        "A value is the mean outcome of continuations with the decision, minus that with the decision sampled anew. "
        "selecting: from half of the continuations, by which decisions are selected: too large on average. confirmed: "
        "from the other half, with its standard error. agrees: whether the advantage has the sign of the value from "
        f"all; unclear: the advantage is 0, or the sign is unknown (false discovery rate {FALSE_DISCOVERIES:.0%})."
    )


def _print_rules(rules: Sequence[RuleFidelity], measured: MeasuredDecisions, skipped: int) -> None:
    console, valued = results_console(), np.isfinite(measured.values.value_D).sum()
    counts = f"{valued:,} decisions, {measured.continuations:,} continuations, {measured.tokens:,} tokens"
    header = ("rule", "fidelity of credit", "fidelity of advantage", "noise ceiling")
    rows = [(r.rule, *map(_share, (r.credit.correlation, r.advantage.correlation, r.advantage.ceiling))) for r in rules]
    show(f"fidelity of each rule; {counts}", new_table(header, rows))
    console.print(
        "fidelity: Spearman's rank correlation [95 %] with the values from all continuations. noise ceiling: the "
        "fidelity of perfect knowledge of each decision's expected value, which no single rollout reveals."
    )
    notes = [*dict.fromkeys(r.advantage.ceiling_note for r in rules), *measured.losses]
    for note in filter(None, [*notes, _SKIPPED.format(skipped) if skipped else ""]):
        console.print(note, soft_wrap=True)


def _share(share: Share) -> str:
    if math.isnan(share.value):
        return "-" if math.isnan(share.high) else f"at most {share.high:.2f}"
    interval = "" if math.isnan(share.low) else f" [{share.low:.2f}, {share.high:.2f}]"
    return f"{share.value:.2f}{interval}"
