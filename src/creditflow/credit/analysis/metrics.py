"""Metrics of a finished assignment: open gates, the distribution of credit, agents without a signal."""

from __future__ import annotations

from functools import partial

import numpy as np

from creditflow.credit.analysis.difference import moved
from creditflow.credit.assignment import Assignment
from creditflow.credit.groups import LEVEL_NAMES, LEVELS, POLICY, cells_of, group_codes
from creditflow.credit.records import OUTCOME, SIGNAL
from creditflow.credit.thresholds.base import BatchStats
from creditflow.data import OK, RIGHT, Bools, Floats


def credit_metrics(assignment: Assignment) -> dict[str, float]:
    """Compute the metrics by name. Ratios with an empty denominator are left out.

    * `propagation/pass_rate[/<agent>]`: share of open gates among steps matched by a reward function. Only for rules
      with gates, like the threshold, forced gates and `credit/gated_off`.
    * `propagation/moved`: share of credit, in absolute value, that steps which are not masked received from
      other steps, in [0, 1]; 0 if credit equals that of `own`. Only for rules that move credit, in batches with edges.
    * `propagation/forced_open/<agent>`: share of gates opened to keep the threshold's floor, among the same steps.
    * `propagation/threshold/<agent>`: the mean threshold in force.
    * `credit/mean/<agent>`: mean credit of trained steps.
    * `credit/share/<agent>`: the agent's share of the credit of all trained steps, in absolute value.
    * `credit/gated_off/<agent>`: share of the credit arriving at the agent's gates, in absolute value, that was
      withheld.
    * `credit/mis_credited/<agent>`: share of trained steps with an ok score (weight 0 included) whose advantage is
      negative although all ok scores are 1, or positive although one is below 1.
    * `credit/reach/<agent>`, `credit/outcome_reach/<agent>`: share of the agent's trajectories in which a signal, or
      the outcome, reaches it, see `reach`.
    * `credit/score_weight/<agent>`: the mean weight of the agent's scores, set by `calibrated` or `decoupled`.
    * `credit/harm/<agent>`: the mean probability that a step did harm, under the rules `calibrated` and `posterior`.
    * `groups/singletons`: groups of one trajectory; their steps backed off.
    * `groups/zero_variance`: groups, after back-off, with equal credits.
    * `groups/no_baseline`: trained steps alone at every level.
    * `groups/masked_steps`: steps left out of training; `groups/frozen_steps`: the frozen ones among them.
    * `groups/alone/<agent>`, `groups/tied/<agent>`, `groups/frozen/<agent>`: share of the agent's steps alone at
      `group_by`, in a group without variance (both of trained steps), or frozen.
    * `critic/credit_explained_var`: share of the variance of credit that the critic's values explain, over the sampled
      tokens of trained steps; 1: all, below 0: worse than a constant. Unlike this, the target of
      `critic/vf_explained_var` contains the critic's later values, unless `lam` is 1.
    * `shadow/moved/<agent>`, `shadow/flipped/<agent>`: the difference to the shadow rule, see `compare_shadow`.

    Masked steps, of whole trajectories or of single agents, count in `groups/masked_steps` only.
    """
    batch, rewards, credit, groups = assignment.batch, assignment.rewards, assignment.credit, assignment.groups
    trained_S, counted_S, advantage_S = groups.trained_S, ~rewards.masked_S, assignment.advantage.advantage_S
    result: dict[str, float] = {}
    if credit.gate_S is not None and batch.edge_child.size and (moved := _moved(assignment, counted_S)) is not None:
        result["propagation/moved"] = moved
    ok_SK = batch.score_status == OK
    right_S = (~ok_SK | (np.where(ok_SK, batch.scores, 1.0) >= RIGHT)).all(axis=1)
    wrong_way_S = np.where(right_S, advantage_S < 0, advantage_S > 0)
    means = partial(_means, assignment)
    result |= means("credit/mean", credit.total_S, trained_S)
    result |= means("credit/mis_credited", wrong_way_S, trained_S & ok_SK.any(axis=1))
    result |= means("groups/alone", _alone(assignment), trained_S) | means("groups/tied", groups.tied_S, trained_S)

    credit_A, _ = _by_agent(assignment, np.abs(credit.total_S), trained_S)
    if credit_A.sum() > 0:
        result |= _shares("credit/share", assignment, credit_A, np.full_like(credit_A, credit_A.sum()))
    result |= {f"credit/reach/{name}": share for name, share in reach(assignment).items()}
    result |= {f"credit/outcome_reach/{name}": share for name, share in reach(assignment, OUTCOME).items()}

    result["groups/singletons"] = float(groups.singletons)
    result["groups/zero_variance"] = float(len(np.unique(groups.group_S[groups.tied_S])))
    result["groups/no_baseline"] = float((trained_S & (groups.group_S < 0)).sum())
    result["groups/masked_steps"] = float((~trained_S).sum())
    if credit.frozen_S is not None:
        result["groups/frozen_steps"] = float((counted_S & credit.frozen_S).sum())
        result |= means("groups/frozen", credit.frozen_S, counted_S)
    return result | _gates(assignment) | _fitted_parts(assignment) | _explained(assignment) | compare_shadow(assignment)


def _gates(assignment: Assignment) -> dict[str, float]:
    """Metrics of a rule with gates."""
    rewards, credit, batch, means = assignment.rewards, assignment.credit, assignment.batch, partial(_means, assignment)
    if credit.gate_open_S is None or credit.threshold_S is None or credit.withheld_S is None:
        return {}
    counted_S = ~rewards.masked_S
    matched_S = counted_S & (rewards.scored_S | rewards.failed_S)
    result = {"propagation/pass_rate": float(credit.gate_open_S[matched_S].mean())} if matched_S.any() else {}
    result |= means("propagation/pass_rate", credit.gate_open_S, matched_S)
    result |= means("propagation/threshold", credit.threshold_S, matched_S)
    if credit.forced_open_S is not None and credit.forced_open_S.any():
        result |= means("propagation/forced_open", credit.forced_open_S, matched_S)
    withheld_A, _ = _by_agent(assignment, np.abs(credit.withheld_S), counted_S)
    arriving_S = np.where(batch.parents_of_step > 0, np.abs(credit.own_S + credit.received_S), 0.0)
    arriving_A, _ = _by_agent(assignment, arriving_S, counted_S)
    return result | _shares("credit/gated_off", assignment, withheld_A, arriving_A)


def _fitted_parts(assignment: Assignment) -> dict[str, float]:
    """Metrics of a rule's `fit`."""
    result: dict[str, float] = {}
    fit, trained_S = assignment.fit, assignment.groups.trained_S
    if fit is not None and fit.score_weight_S is not None:
        scored_S = trained_S & assignment.rewards.scored_S
        result |= _means(assignment, "credit/score_weight", fit.score_weight_S, scored_S)
    if fit is not None and fit.harmless_S is not None:
        over_S = trained_S & ~np.isnan(fit.harmless_S)
        result |= _means(assignment, "credit/harm", 1.0 - fit.harmless_S, over_S)
    return result


def _moved(assignment: Assignment, over_S: Bools) -> float | None:
    """The share of credit received from other steps; None without any credit."""
    received = float(np.abs(assignment.credit.received_S[over_S]).sum())
    own = float(np.abs(assignment.credit.own_S[over_S] + assignment.credit.shared_S[over_S]).sum())
    return received / (received + own) if received + own > 0 else None


def _explained(assignment: Assignment) -> dict[str, float]:
    if assignment.advantage.critic is None:
        return {}
    batch = assignment.batch
    step_of_token = np.repeat(np.arange(batch.n_steps), np.diff(batch.token_offsets))
    over_T = assignment.groups.trained_S[step_of_token] & batch.response_mask
    credit = assignment.credit.total_S[step_of_token[over_T]]
    share = explained_variance(credit, assignment.advantage.critic.values_T[over_T])
    return {} if share is None else {"critic/credit_explained_var": share}


def explained_variance(target: Floats, values: Floats) -> float | None:
    """1 - Var(target - values) / Var(target), at most 1; None if `target` is constant.

    Below 0, `values` are worse than a constant.
    """
    variance = float(target.var()) if target.size else 0.0
    return None if variance <= 1e-12 else 1.0 - float((target - values).var()) / variance


def _alone(assignment: Assignment) -> Bools:
    """[S] whether the step's trajectory was alone in its group at `group_by`."""
    level_S, group_by = assignment.groups.level_S, LEVEL_NAMES.index(assignment.options.group_by)
    return np.asarray((level_S != group_by) & (level_S < LEVEL_NAMES.index(POLICY)))


def reach(assignment: Assignment, bit: np.uint8 = SIGNAL) -> dict[str, float]:
    """The share of each agent's trajectories in which a signal reaches at least one of its steps.

    A signal depends on the trajectory: the step's own score, the outcome, or credit from a child with a signal, through
    open gates. Values that do not depend on the agents' actions do not count: a missing score, a weight of 0, the
    substitute for a failed score. `bit`: SIGNAL, or OUTCOME for the outcome alone.
    """
    batch, masked_S = assignment.batch, assignment.rewards.masked_S
    key_S = batch.agent_of_step.astype(np.int64) * batch.n_trajectories + batch.trajectory_of_step
    agents = len(batch.agent_names)
    trajectories = np.unique(key_S[~masked_S]) // batch.n_trajectories
    reached = np.unique(key_S[~masked_S & ((assignment.credit.reached_S & bit) > 0)]) // batch.n_trajectories
    trajectories_A, reached_A = np.bincount(trajectories, minlength=agents), np.bincount(reached, minlength=agents)
    return {batch.agent_names[a]: float(reached_A[a] / trajectories_A[a]) for a in np.flatnonzero(trajectories_A)}


def unreached_agents(assignment: Assignment) -> tuple[str, ...]:
    """Agents without a signal in any trajectory of the batch: they do not learn under these options."""
    return tuple(agent for agent, share in reach(assignment).items() if share == 0.0)


def compare_shadow(assignment: Assignment) -> dict[str, float]:
    """Compare with the shadow, by agent, over steps trained by both; empty without a shadow.

    * `shadow/moved/<agent>`: the difference in credit, `CreditChange.share_moved`, in [0, 1].
    * `shadow/flipped/<agent>`: share of steps whose advantages have opposite signs.
    """
    shadow = assignment.shadow
    if shadow is None:
        return {}
    changes = moved(assignment, shadow)
    return {f"shadow/moved/{agent}": change.share_moved for agent, change in changes.items() if change.credit} | {
        f"shadow/flipped/{agent}": change.share_flipped for agent, change in changes.items() if change.both
    }


def batch_stats(assignment: Assignment, accuracy: float | None = None) -> BatchStats:
    """Sub-rewards by agent and their spread within groups, the input of thresholds.

    Masked steps are left out.

    The spread is pooled over the agent's groups:
    `sqrt(sum over groups and trajectories of mean_t (r - m)^2 / sum (n - 1))`.
    """
    batch = assignment.batch
    over_S = assignment.rewards.scored_S & ~assignment.rewards.masked_S & ~np.isnan(assignment.rewards.sub_reward_S)
    values_S, names = assignment.rewards.sub_reward_S, batch.agent_names
    agents = np.unique(batch.agent_of_step[over_S]).tolist()
    sub_rewards = {names[a]: values_S[over_S & (batch.agent_of_step == a)] for a in agents}
    level = assignment.options.group_by if "agent" in LEVELS[assignment.options.group_by] else "task_agent"
    at = np.flatnonzero(over_S)
    if not at.size:
        return BatchStats({}, {}, accuracy)
    code = group_codes(batch, level, assignment.options.max_version_lag, assignment.rewards.stratum_S)[at]
    cells = cells_of(values_S[at], code, batch.trajectory_of_step[at])
    squares_G = cells.spread_G**2 * np.maximum(cells.size_G - 1, 0)
    agent_G = np.zeros(len(squares_G), dtype=np.int64)
    agent_G[code] = batch.agent_of_step[at]
    square_A = np.bincount(agent_G, squares_G, len(names))
    free_A = np.bincount(agent_G, np.maximum(cells.size_G - 1, 0), len(names))
    spread = {names[a]: float(np.sqrt(square_A[a] / free_A[a])) for a in np.flatnonzero(free_A)}
    return BatchStats(sub_rewards, spread, accuracy)


def _means(assignment: Assignment, name: str, values_S: Floats | Bools, over_S: Bools) -> dict[str, float]:
    """The mean over each agent's steps in `over_S`."""
    return _shares(name, assignment, *_by_agent(assignment, values_S, over_S))


def _shares(name: str, assignment: Assignment, sums_A: Floats, over_A: Floats) -> dict[str, float]:
    names = assignment.batch.agent_names
    return {f"{name}/{names[a]}": float(sums_A[a] / over_A[a]) for a in np.flatnonzero(over_A)}


def _by_agent(assignment: Assignment, values_S: Floats | Bools, over_S: Bools) -> tuple[Floats, Floats]:
    """[A] the sum of `values_S` over each agent's steps in `over_S`, and the number of those steps."""
    agent_S, agents = assignment.batch.agent_of_step[over_S], len(assignment.batch.agent_names)
    sums_A = np.bincount(agent_S, values_S[over_S].astype(np.float64), agents).astype(np.float64)
    return sums_A, np.bincount(agent_S, minlength=agents).astype(np.float64)
