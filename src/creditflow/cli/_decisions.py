"""The audits of a run and of trajectories in a Parquet file: measure, print, and summarize."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from creditflow._utils.progress import Reporter
from creditflow.config import credit_options
from creditflow.credit import Assignment, assign
from creditflow.data import Bools, Trajectory, TrajectoryBatch
from creditflow.engines.local.values import Fidelity, Share
from creditflow.errors import ConfigError, InputError
from creditflow.reports.tables import new_table, results_console, show
from creditflow.studies.decisions import DecisionRow, RuleFidelity, decision_rows, rule_fidelities

if TYPE_CHECKING:
    from creditflow.engines.common.components import Components
    from creditflow.engines.local.decisions import Branch, ChosenDecisions, MeasuredDecisions, MeasuringRollouts
    from creditflow.engines.local.policy_set import PolicySet


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """The options of `creditflow audit`."""

    decisions: int
    """Maximum number of decisions, drawn at random."""
    continuations: int
    top: int
    """Number of decisions to print."""
    rules: tuple[str, ...]
    """Rules to compare, each a rule's name, `key=value` credit options, or both, separated by blanks."""
    training_step: int | None
    """None: the one nearest to a checkpoint, the last of several."""
    model: Path | None
    """Model folder used for the trained policies; None: the nearest checkpoint."""
    recipe: str | None
    """The recipe with the workflow of imported trajectories."""
    overrides: tuple[str, ...]
    endpoint: str | None
    served_model: str | None
    api_key_env: str | None
    outcome: str | None


@dataclass(frozen=True, slots=True)
class DecisionAudit:
    """The recorded trajectories of an audit, and the team that continues them."""

    title: str
    batch: TrajectoryBatch
    trajectories: Sequence[Trajectory]
    assignments: Mapping[str, Assignment]
    """Each rule's assignment, by display name."""
    trained: Assignment | None
    """The assignment that was trained on; None for trajectories without one."""
    skipped: Mapping[int, str]
    """The reason by step, for steps that cannot be audited."""
    policy_set: PolicySet | None
    rollouts: MeasuringRollouts
    branch: Branch
    key: tuple[int, ...]
    """Begins the random key of the continuations."""


def trained_run_audit(
    batch: TrajectoryBatch,
    assignments: Mapping[str, Assignment],
    trained: Assignment,
    components: Components,
    policy_set: PolicySet,
    step: int,
    description: str,
) -> DecisionAudit:
    """The audit of training step `step` of a run. `description`: the acting policies."""
    from creditflow.config import trained_agents
    from creditflow.engines.local.decisions import DECISION_AUDIT, MeasuringRollouts, workflow_branch
    from creditflow.engines.local.fidelity import decision_candidates

    candidate_S = decision_candidates(trained, trained_agents(components.recipe.config))
    skipped = dict.fromkeys(np.flatnonzero(~candidate_S).tolist(), "not trained, or its outcome is unknown")
    rollouts = MeasuringRollouts(components, policy_set)
    return DecisionAudit(
        f"training step {step}; {description}",
        batch,
        batch.to_trajectories(),
        assignments,
        trained,
        skipped,
        policy_set,
        rollouts,
        workflow_branch(rollouts),
        (DECISION_AUDIT, step),
    )


def imported_audit(
    source: Path,
    batch: TrajectoryBatch,
    options: AuditOptions,
    rules: Mapping[str, Mapping[str, Any]],
    reporter: Reporter,
) -> DecisionAudit:
    """The audit of imported trajectories: with their recipe, or with an endpoint alone. Raises InputError."""
    from creditflow.engines.local.decisions import DECISION_AUDIT, MeasuringRollouts, workflow_branch
    from creditflow.engines.local.final_steps import endpoint_components, final_step_branch, final_step_problem

    trajectories = batch.to_trajectories()
    problems = {}
    if options.recipe is not None:
        with reporter.bar(f"loading {options.recipe}", announce=True, keep=False):
            components, policy_set = _recipe_parts(options)
        rollouts = MeasuringRollouts(components, policy_set)
        branch = workflow_branch(rollouts)
        actors = options.endpoint or options.model or "the models of the recipe"
        if options.endpoint is not None:  # its tokens are unknown, so that records are compared by their texts
            trajectories = [_without_tokens(trajectory) for trajectory in trajectories]

        def problem(trajectory: Trajectory, index: int) -> str:
            agent = trajectory.steps[index].agent
            return "" if agent in components.agents else f"the recipe's team has no agent {agent}"

    elif options.endpoint is None:
        raise ConfigError(
            f"{source}: it has no workflow to roll out its tasks again; name its recipe with --recipe, or, to sample "
            "final steps alone, --endpoint and --outcome"
        )
    else:
        if options.outcome is None:
            raise ConfigError("--outcome: expected an outcome function, which an endpoint alone does not have")
        components, policy_set = endpoint_components(_endpoint(options), options.outcome, Path.cwd()), None
        rollouts = MeasuringRollouts(components, None)
        branch, problem, actors = final_step_branch(rollouts), final_step_problem, options.endpoint
    places = ((n, index) for n, trajectory in enumerate(trajectories) for index in range(len(trajectory.steps)))
    for row, (n, index) in enumerate(places):
        failed = trajectories[n].status == "failed"
        if text := "its trajectory failed" if failed else problem(trajectories[n], index):
            problems[row] = text
    return DecisionAudit(
        f"{source}; {actors} acts",
        batch,
        trajectories,
        {name: assign(batch, credit_options(**changed)) for name, changed in rules.items()},
        None,
        problems,
        policy_set,
        rollouts,
        branch,
        (DECISION_AUDIT, 0),
    )


def _without_tokens(trajectory: Trajectory) -> Trajectory:
    """A copy with texts alone, as a model behind an endpoint leaves them."""
    steps = [replace(s, prompt_ids=(), response_ids=(), response_mask=(), logprobs=()) for s in trajectory.steps]
    return replace(trajectory, steps=steps)


def _recipe_parts(options: AuditOptions) -> tuple[Components, PolicySet | None]:
    """The components of the recipe of imported trajectories, and its local policies, if they act."""
    from creditflow.config import PolicyConfig, load_recipe
    from creditflow.engines.common.components import build_components, chat_client
    from creditflow.engines.local.policy import Policy, pick_device
    from creditflow.engines.local.policy_set import PolicySet

    assert options.recipe is not None
    recipe = load_recipe(Path(options.recipe), list(options.overrides))
    components = build_components(recipe, tasks=False)
    if options.endpoint is None:
        policy_set = PolicySet.for_rollouts(recipe)
        if options.model is not None:
            loaded = Policy.load(options.model, pick_device(recipe.config.trainer.device))
            policy_set = replace(policy_set, policies=dict.fromkeys(policy_set.policies, loaded))
        return components, policy_set
    if options.model is not None:
        raise ConfigError("--model, --endpoint: expected one of them: either acts for every agent")
    if with_tools := [name for name, spec in components.agents.items() if spec.tools]:
        raise ConfigError(f"--endpoint: {with_tools[0]} has tools, which a model behind an endpoint cannot call")
    client = chat_client("--endpoint", PolicyConfig(), _endpoint(options))
    policies = {spec.policy for spec in components.agents.values()}
    return replace(components, chat_clients=dict.fromkeys(sorted(policies), client)), None


def _endpoint(options: AuditOptions) -> Any:
    from creditflow.config import EndpointConfig
    from creditflow.rollout.endpoint import address_of

    assert options.endpoint is not None
    if not options.served_model:
        raise ConfigError("--served-model: expected the model's name as the server of --endpoint knows it")
    try:
        address_of(options.endpoint, "--endpoint")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return EndpointConfig(base_url=options.endpoint, model=options.served_model, api_key_env=options.api_key_env)


def run_audit(audit: DecisionAudit, options: AuditOptions, reporter: Reporter) -> dict[str, Any]:
    """Measure, print, and return the facts to write."""
    from creditflow.engines.local.decisions import choose_decisions

    candidate_S: Bools = np.ones(audit.batch.n_steps, dtype=np.bool_)
    candidate_S[list(audit.skipped)] = False
    if not candidate_S.any():
        raise InputError(f"no decision can be audited: {_reasons(audit.skipped)}")
    config = audit.rollouts.components.recipe.config
    seed = config.data.seed
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, *audit.key))))
    chosen = choose_decisions(audit.batch, candidate_S, options.continuations, options.decisions, math.inf, rng)
    reporter.say(
        f"{audit.title}: {len(chosen.step_D):,} of {audit.batch.n_steps:,} decisions, "
        f"{options.continuations} continuations of each prefix"
    )
    measured = asyncio.run(_measure(audit, chosen, options.continuations, reporter))
    measured.expect_few_failures(config.actor_rollout_ref.rollout.max_failed_frac)
    rows = decision_rows(audit.batch, chosen.step_D, measured.values, audit.trained)
    rules = rule_fidelities(audit.assignments, chosen.step_D, measured.values)
    _print(audit, rows, rules, measured, options.top)
    precision = measured.values.precision
    return {
        "title": audit.title,
        "options": asdict(options),
        "seed": seed,
        "probability": chosen.probability,
        "tokens": measured.tokens,
        "continuations": measured.continuations,
        "refused": measured.refused,
        "first_refusal": measured.first_refusal,
        "failed": measured.failed,
        "reliability": None if precision is None else precision.reliability,
        "is_noise": None if precision is None else precision.is_noise,
        "not_auditable": dict(Counter(audit.skipped.values())),
        "rules": [asdict(rule) for rule in rules],
        "decisions": [asdict(row) for row in rows],
    }


async def _measure(
    audit: DecisionAudit, chosen: ChosenDecisions, continuations: int, reporter: Reporter
) -> MeasuredDecisions:
    from creditflow.engines.local.decisions import measure_decisions

    policies = {} if audit.policy_set is None else audit.policy_set.policies
    with reporter.bar("continuations", unit="rollouts") as bar:
        async with audit.rollouts.components.rewards.open(policies):
            return await measure_decisions(
                audit.rollouts,
                audit.branch,
                audit.batch,
                audit.trajectories,
                chosen,
                continuations,
                audit.key,
                bar.reach,
            )


def _print(
    audit: DecisionAudit,
    rows: Sequence[DecisionRow],
    rules: Sequence[RuleFidelity],
    measured: MeasuredDecisions,
    top: int,
) -> None:
    console = results_console()
    valued = [row for row in rows if math.isfinite(row.value)]
    header = ("step", "agent", "value", "standard error", "advantage", "agree")
    cells = [
        (r.step_id, r.agent, f"{r.value:+.3f}", _number(r.error, ""), _number(r.advantage), r.agrees or "-")
        for r in valued[:top]
    ]
    show(f"decisions that mattered most, {audit.title}", new_table(header, cells))
    console.print(
        "value: mean outcome of continuations with the decision, minus that of continuations with the decision sampled "
        "anew. agree: whether the advantage has the sign of the value; unclear: the value's 95 % interval contains 0, "
        "or the advantage is 0."
    )
    counts = f"{len(valued):,} decisions, {measured.continuations:,} continuations, {measured.tokens:,} tokens"
    table = [(r.rule, _fidelity(r.credit), _fidelity(r.advantage), _share(r.advantage.ceiling)) for r in rules]
    show(f"fidelity of each rule; {counts}", new_table(("rule", "credit", "advantage", "noise ceiling"), table))
    console.print(
        "credit, advantage: Spearman's rank correlation [95 %] with the values. noise ceiling: the correlation that "
        "perfect credit would have with these measured values."
    )
    precision = measured.values.precision
    if precision is not None and precision.is_noise:
        console.print("These values may be noise: raise --continuations or --decisions before comparing rules.")
    if audit.skipped:
        console.print(f"not auditable: {_reasons(audit.skipped)}", soft_wrap=True)
    if measured.refused:
        console.print(
            f"refused: {measured.refused:,} continuations whose replay differed from the record; the first: "
            f"{measured.first_refusal}",
            soft_wrap=True,
        )
    if measured.failed:
        console.print(f"failed: {measured.failed:,} continuations; the first: {measured.first_failure}", soft_wrap=True)


def _reasons(skipped: Mapping[int, str]) -> str:
    """The reasons with their numbers of steps, the most frequent first."""
    return "; ".join(f"{n:,} steps: {reason}" for reason, n in Counter(skipped.values()).most_common())


def _number(value: float | None, sign: str = "+") -> str:
    return "-" if value is None or math.isnan(value) else f"{value:{sign}.3f}"


def _fidelity(fidelity: Fidelity) -> str:
    return _share(fidelity.correlation)


def _share(share: Share) -> str:
    if math.isnan(share.value):
        return "-"
    interval = "" if math.isnan(share.low) else f" [{share.low:.2f}, {share.high:.2f}]"
    return f"{share.value:.2f}{interval}"
