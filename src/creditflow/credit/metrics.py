"""What to watch of an assignment: whether gates pass, where credit goes, whom nothing reaches.

Reads a finished assignment; knows nothing of how it was made, and has no say in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from creditflow.credit.difference import moved
from creditflow.credit.gates import PASSING, RECEIVING
from creditflow.credit.groups import LEVEL_NAMES, LEVELS, POLICY, cells_of, codes_of_level, spread_of
from creditflow.credit.propagate import OUTCOME, SHARES, SIGNAL, parent_counts
from creditflow.credit.thresholds import Observed
from creditflow.trajectory import OK, RIGHT, Bools, Floats, Ints

if TYPE_CHECKING:
    from creditflow.credit.assignment import Assignment


def summarize(assignment: Assignment) -> dict[str, float]:
    """Metrics by name. One that has nothing to be a share of is left out rather than given a number.

    * `propagation/pass_rate[/<agent>]`: share of open gates among steps that a function was to score.
    * `propagation/moved`: of the credit of steps that are not masked, in absolute value, the share that they received
      from other steps: 0 where credit is the same as that of `none`, at most 1. Only for rules that move credit, and
      where a step has a parent.
    * `propagation/forced_open/<agent>`: share of those that were opened to keep the threshold's floor.
    * `propagation/threshold/<agent>`: the mean threshold in force.
    * `credit/mean/<agent>`: mean credit of trained steps.
    * `credit/share/<agent>`: of the credit of all trained steps, in absolute value, the agent's share.
    * `credit/gated_off/<agent>`: share of the credit, in absolute value, that came to the agent's gates and was
      withheld.
    * `credit/mis_credited/<agent>`: share of trained steps with an ok score (weight 0 included) whose advantage is
      negative although all their ok scores are 1, or positive although one is below 1.
    * `credit/reach/<agent>`, `credit/outcome_reach/<agent>`: share of its plays in which a signal, or the outcome,
      reaches the agent, see `reach`.
    * `groups/singletons`: groups of one trajectory; their steps backed off (or leaned on the groups around).
    * `groups/zero_variance`: groups, after back-off, whose credits are all the same.
    * `groups/no_baseline`: trained steps that were alone at every level.
    * `groups/masked_steps`: steps left out of training; `groups/frozen_steps`: those of them upstream of a failure.
    * `groups/alone/<agent>`, `groups/tied/<agent>`, `groups/frozen/<agent>`: share of its steps that were alone at
      `group_by`, that are in a group without variance (both of trained steps), that are frozen.
    * `critic/credit_explained_var`: share of the variance of credit, as it came about, that a critic's values explain,
      over the sampled tokens of trained steps; 1 is all, below 0 is worse than a constant. What a critic is trained on
      (`critic/vf_explained_var`) holds its own later values, unless `lam` is 1; this does not.
    * `shadow/moved/<agent>`, `shadow/flipped/<agent>`: what another rule would have done, see `compare_shadow`.

    Steps of masked trajectories count in `groups/masked_steps` only.
    """
    batch, trained_S = assignment.batch, assignment.trained_S
    kept_S = ~assignment.masked_N[batch.trajectory_of_step]
    result: dict[str, float] = {}

    judged_S = kept_S & (assignment.scored_S | assignment.failed_S)
    if judged_S.any():
        result["propagation/pass_rate"] = float(assignment.gate_open_S[judged_S].mean())

    if assignment.flows and assignment.batch.edge_child.size and (moved := _moved(assignment, kept_S)) is not None:
        result["propagation/moved"] = moved

    ok_SK = batch.score_status == OK
    right_S = (~ok_SK | (np.where(ok_SK, batch.scores, 1.0) >= RIGHT)).all(axis=1)
    wrong_way_S = np.where(right_S, assignment.advantage_S < 0, assignment.advantage_S > 0)
    for name, values_S, over_S in (
        ("propagation/pass_rate", assignment.gate_open_S, judged_S),
        ("propagation/threshold", assignment.threshold_S, judged_S),
        ("credit/mean", assignment.credit_S, trained_S),
        ("credit/mis_credited", wrong_way_S, trained_S & ok_SK.any(axis=1)),
        ("groups/alone", _alone(assignment), trained_S),
        ("groups/tied", assignment.tied_S, trained_S),
        *([("groups/frozen", assignment.frozen_S, kept_S)] if assignment.frozen_S.any() else []),
        *([("propagation/forced_open", assignment.forced_open_S, judged_S)] if assignment.forced_open_S.any() else []),
    ):
        result |= _shares(name, assignment, *_by_agent(assignment, values_S, over_S))

    credit_A, _ = _by_agent(assignment, np.abs(assignment.credit_S), trained_S)
    if credit_A.sum() > 0:
        result |= _shares("credit/share", assignment, credit_A, np.full_like(credit_A, credit_A.sum()))
    withheld, _ = _by_agent(assignment, np.abs(assignment.stopped_S), kept_S)
    offered, _ = _by_agent(assignment, _offered(assignment), kept_S)
    result |= _shares("credit/gated_off", assignment, withheld, offered)
    result |= {f"credit/reach/{name}": share for name, share in reach(assignment).items()}
    result |= {f"credit/outcome_reach/{name}": share for name, share in reach(assignment, OUTCOME).items()}

    result["groups/singletons"] = float(assignment.singletons)
    result["groups/zero_variance"] = float(len(np.unique(assignment.group_S[assignment.tied_S])))
    result["groups/no_baseline"] = float((trained_S & (assignment.group_S < 0)).sum())
    result["groups/masked_steps"] = float((~trained_S).sum())
    result["groups/frozen_steps"] = float((kept_S & assignment.frozen_S).sum())
    return result | _explained(assignment) | compare_shadow(assignment)


def _moved(assignment: Assignment, kept_S: Bools) -> float | None:
    """The received share of credit; None without any credit."""
    received = float(np.abs(assignment.received_S[kept_S]).sum())
    own = float(np.abs(assignment.own_S[kept_S] + assignment.shared_S[kept_S]).sum())
    return received / (received + own) if received + own > 0 else None


def _explained(assignment: Assignment) -> dict[str, float]:
    if assignment.critic is None:
        return {}
    batch = assignment.batch
    step_of_token = np.repeat(np.arange(batch.n_steps), np.diff(batch.token_offsets))
    over_T = assignment.trained_S[step_of_token] & batch.response_mask
    credit = assignment.credit_S[step_of_token[over_T]]
    share = explained_variance(credit, assignment.critic.values_T[over_T])
    return {} if share is None else {"critic/credit_explained_var": share}


def explained_variance(target: Floats, values: Floats) -> float | None:
    """1 - Var(target - values) / Var(target); 1 is all, below 0 worse than a constant. None if `target` is constant."""
    variance = float(target.var()) if target.size else 0.0
    return None if variance <= 1e-12 else 1.0 - float((target - values).var()) / variance


def _alone(assignment: Assignment) -> Bools:
    """[S] the step had nobody to be compared with at the level asked for."""
    asked = LEVEL_NAMES.index(assignment.options.group_by)
    backed_off_S: Bools = (assignment.level_S != asked) & (assignment.level_S != LEVEL_NAMES.index(POLICY))
    if assignment.options.baseline == "shrunk":
        backed_off_S = assignment.group_size_S < 2
    return backed_off_S


def reach(assignment: Assignment, bit: np.uint8 = SIGNAL) -> dict[str, float]:
    """For each agent, the share of its plays in which a signal reaches at least one of its steps.

    A signal is something that depends on the play: a score of the step's own, the outcome, or credit from a child that
    has one, through its open gate. What is the same whatever the agents do (nothing scored, nothing handed on, a weight
    of 0, a mean that stands in for a failed score) is none. `bit`: SIGNAL, or OUTCOME for the outcome alone.
    """
    batch = assignment.batch
    kept_S = ~assignment.masked_N[batch.trajectory_of_step]
    key_S = batch.agent_of_step * batch.n_trajectories + batch.trajectory_of_step
    agents = len(batch.agent_names)
    plays = np.unique(key_S[kept_S]) // batch.n_trajectories
    reached = np.unique(key_S[kept_S & ((assignment.reached_S & bit) > 0)]) // batch.n_trajectories
    plays_A, reached_A = np.bincount(plays, minlength=agents), np.bincount(reached, minlength=agents)
    return {batch.agent_names[a]: float(reached_A[a] / plays_A[a]) for a in np.flatnonzero(plays_A)}


def unreached_agents(assignment: Assignment) -> tuple[str, ...]:
    """Agents that no signal reaches in any play of the batch: under this configuration they do not learn."""
    return tuple(agent for agent, share in reach(assignment).items() if share == 0.0)


def compare_shadow(assignment: Assignment) -> dict[str, float]:
    """By agent, over steps that both rules train; empty without a shadow.

    * `shadow/moved/<agent>`: how different the shadow's credit is, `Moved.share_moved`, in [0, 1].
    * `shadow/flipped/<agent>`: share of steps whose advantage would have had the other sign.
    """
    shadow = assignment.shadow
    if shadow is None:
        return {}
    by_agent = moved(assignment, shadow)
    of_credit = {f"shadow/moved/{agent}": found.share_moved for agent, found in by_agent.items() if found.credit}
    return of_credit | {
        f"shadow/flipped/{agent}": found.share_flipped for agent, found in by_agent.items() if found.both
    }


def observe(assignment: Assignment, accuracy: float | None = None) -> Observed:
    """Sub-rewards by agent, and their spread within groups: what thresholds move by. Masked trajectories are left out.

    The spread is pooled over the agent's groups: `sqrt(sum over groups and plays of mean_t (r - m)^2 / sum (n - 1))`.
    """
    batch = assignment.batch
    over_S = assignment.scored_S & ~assignment.masked_N[batch.trajectory_of_step] & ~np.isnan(assignment.sub_reward_S)
    values_S, names = assignment.sub_reward_S, batch.agent_names
    agents = np.unique(batch.agent_of_step[over_S]).tolist()
    sub_rewards = {names[a]: values_S[over_S & (batch.agent_of_step == a)] for a in agents}
    level = assignment.options.group_by if "agent" in LEVELS[assignment.options.group_by] else "task_agent"
    at = np.flatnonzero(over_S)
    if not at.size:
        return Observed({}, {}, accuracy)
    code = codes_of_level(batch, level, assignment.stratum_S)[at]
    cells = cells_of(values_S[at], code, batch.trajectory_of_step[at])
    squares_G = spread_of(cells, code, values_S[at], cells.mean_G) ** 2 * np.maximum(cells.size_G - 1, 0)
    agent_G = np.zeros(len(squares_G), dtype=np.int64)
    agent_G[code] = batch.agent_of_step[at]
    square_A = np.bincount(agent_G, squares_G, len(names))
    free_A = np.bincount(agent_G, np.maximum(cells.size_G - 1, 0), len(names))
    spread = {names[a]: float(np.sqrt(square_A[a] / free_A[a])) for a in np.flatnonzero(free_A)}
    return Observed(sub_rewards, spread, accuracy)


def _offered(assignment: Assignment) -> Floats:
    """[S] the credit, in absolute value, that came to the step's gates: its own on the way out, its children's on the
    way in.
    """
    from creditflow.credit import kernels

    batch, options = assignment.batch, assignment.options
    if not assignment.out_S.any() and not assignment.in_S.any():  # nothing comes to any gate
        return np.zeros(batch.n_steps)
    credit_S = assignment.own_S + assignment.received_S
    share_S = SHARES[options.share](batch, parent_counts(batch))
    offered_S = np.zeros(batch.n_steps)
    if options.gate_at in PASSING:
        offered_S += parent_counts(batch) * share_S * np.abs(credit_S)
    if options.gate_at in RECEIVING:
        offered_S += kernels.withheld_by_receivers(
            batch.edge_child, batch.edge_parent, credit_S, assignment.out_S, assignment.in_S, share_S
        )[1]
    return offered_S


def _shares(name: str, assignment: Assignment, sums_A: Floats, over_A: Floats) -> dict[str, float]:
    names = assignment.batch.agent_names
    return {f"{name}/{names[a]}": float(sums_A[a] / over_A[a]) for a in np.flatnonzero(over_A)}


def _by_agent(assignment: Assignment, values_S: Floats | Bools | Ints, over_S: Bools) -> tuple[Floats, Floats]:
    """[A] the sum of `values_S` over the steps in `over_S`, and their number."""
    agent_S, agents = assignment.batch.agent_of_step[over_S], len(assignment.batch.agent_names)
    sums_A = np.bincount(agent_S, values_S[over_S].astype(np.float64), agents).astype(np.float64)
    return sums_A, np.bincount(agent_S, minlength=agents).astype(np.float64)
