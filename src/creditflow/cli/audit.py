"""`creditflow audit`: compare credit with the measured values of single decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from creditflow._utils.files import make_folder, write_json
from creditflow._utils.progress import Reporter
from creditflow.cli._decisions import AuditOptions, imported_audit, run_audit, trained_run_audit
from creditflow.cli._options import JsonFile, Overrides, expect_json_folder
from creditflow.credit import Assignment
from creditflow.errors import ConfigError, InputError
from creditflow.reports.tables import results_console
from creditflow.runs import Ledger, Recorded

if TYPE_CHECKING:
    from creditflow.engines.common.components import Components
    from creditflow.engines.local.policy_set import PolicySet

IN_FORCE = "in force"
"""Display name of the credit recorded in the run."""


def audit(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a run, or a Parquet file of imported trajectories.")
    ],
    overrides: Overrides = None,
    *,
    decisions: Annotated[int, typer.Option(min=1, help="Maximum number of decisions, drawn at random.")] = 200,
    continuations: Annotated[
        int, typer.Option(min=2, help="Continuations with a decision, and as many with the decision sampled anew.")
    ] = 8,
    top: Annotated[int, typer.Option(min=0, help="Number of decisions to print.")] = 20,
    rule: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE",
            help="A rule to compare: its name, or credit options in quotes; may be repeated. "
            "Default: the rules with a comparison rank.",
        ),
    ] = None,
    training_step: Annotated[
        int | None,
        typer.Option(
            min=1, help="The training step to audit; default: the one nearest to a checkpoint, the last of several."
        ),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Model of the trained policies; default: the checkpoint.")
    ] = None,
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
    json: JsonFile = None,
) -> None:
    """Measure how faithful credit is.

    Continues the trajectories of a training step with and without single steps. Prints the steps that mattered, and
    one row per rule.
    """
    expect_json_folder(json)
    options = AuditOptions(
        decisions,
        continuations,
        top,
        tuple(rule or ()),
        training_step,
        model,
        recipe,
        tuple(overrides or ()),
        endpoint,
        served_model,
        api_key_env,
        outcome,
    )
    imported = run.suffix == ".parquet" or (
        (run / "run.json").is_file() and Ledger.open(run).run.get("engine") == "none"
    )
    if imported:
        facts = _audit_imported(run, options)
    else:
        of_imported = {
            "--recipe": recipe,
            "--endpoint": endpoint,
            "--served-model": served_model,
            "--api-key-env": api_key_env,
            "--outcome": outcome,
            "KEY=VALUE": overrides or None,
        }
        for name in (name for name, value in of_imported.items() if value is not None):
            raise ConfigError(f"{name}: is for imported trajectories (a Parquet file); a run has its own recipe")
        facts = _audit_run(run, options)
    if json is not None:
        write_json(json, facts)


def _audit_run(run: Path, options: AuditOptions) -> dict[str, Any]:
    """Audit a training step of a run, and write the facts to its folder."""
    from creditflow.config import load_recipe
    from creditflow.engines.common.components import build_components

    reporter, ledger, rules = Reporter(), Ledger.open(run), _rules(options.rules)
    with reporter.bar(f"loading {run}", announce=True, keep=False):
        components = build_components(load_recipe(run / "config.yaml"), tasks=False)
        step, checkpoint, policy_set = _load_policies(ledger, components, options)
    make_folder(run / "audit", "RUN")  # fails before the rollouts if the folder is not writable
    recorded = ledger.read(step)
    assignments = _assignments(recorded, rules, options.rules, reporter)
    actor = str(options.model or (f"checkpoint {checkpoint}" if checkpoint else "the initial model"))
    audited = trained_run_audit(
        recorded.batch, assignments, assignments[IN_FORCE], components, policy_set, step, f"{actor} acts"
    )
    facts = {"training_step": step, "checkpoint": checkpoint, **run_audit(audited, options, reporter)}
    audit_file = run / "audit" / f"{step:06d}.json"
    write_json(audit_file, facts)
    results_console().print(f"written: {audit_file}", soft_wrap=True)
    return facts


def _audit_imported(source: Path, options: AuditOptions) -> dict[str, Any]:
    from creditflow.data import read_parquet

    reporter, rules = Reporter(), _rules(options.rules)
    if source.suffix == ".parquet":
        batch = read_parquet(source)
    else:
        ledger = Ledger.open(source)
        if not ledger.steps:
            raise InputError(f"{source}: expected recorded trajectories, found none")
        batch = ledger.read(options.training_step or ledger.steps[-1]).batch
    return run_audit(imported_audit(source, batch, options, rules, reporter), options, reporter)


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
    recorded: Recorded, rules: Mapping[str, Mapping[str, Any]], options: Sequence[str], reporter: Reporter
) -> dict[str, Assignment]:
    """The recorded assignment, and each rule's assignment of the recorded trajectories.

    `options`: the rules of the command line. A rule that is compared by default is left out if it contradicts the
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
            if options:
                raise
            reporter.say(f"{name} is left out: {error}")
    return assignments


def _load_policies(ledger: Ledger, components: Components, options: AuditOptions) -> tuple[int, int | None, PolicySet]:
    """(training step, checkpoint, policies) of an audit.

    The checkpoint is the training step of the one in use; 0: the initial policies; None: the model of `--model`.
    """
    from creditflow.engines.local import checkpoint
    from creditflow.engines.local.policy import Policy, pick_device
    from creditflow.engines.local.policy_set import PolicySet

    if not ledger.steps:
        raise InputError(f"{ledger.path}: expected recorded training steps, found none")
    step, saved = (
        (options.training_step or ledger.steps[-1], None)
        if options.model is not None
        else _nearest(ledger, options.training_step)
    )
    ledger.file(step)
    recipe = components.recipe
    trainer, keeps = recipe.config.trainer, components.rewards.needs_reference
    policy_set = PolicySet.from_recipe(recipe, trainer.total_training_steps or 1, keep_reference=keeps)
    if options.model is not None:
        model = Policy.load(options.model, pick_device(trainer.device))
        policy_set = replace(policy_set, policies={**policy_set.policies, **dict.fromkeys(policy_set.actors, model)})
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
