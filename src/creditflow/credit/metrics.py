"""What to watch of an assignment: whether gates pass, where credit goes, whom nothing reaches.

Reads a finished assignment; knows nothing of how it was made, and has no say in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from creditflow.trajectory import OK, RIGHT, Bools, Floats, Ints

if TYPE_CHECKING:
    from creditflow.credit.assignment import Assignment


def summarize(assignment: Assignment) -> dict[str, float]:
    """Metrics by name. One that has nothing to be a share of is left out rather than given a number.

    * `propagation/pass_rate[/<agent>]`: share of open gates among steps that a function was to score.
    * `credit/mean/<agent>`: mean credit of trained steps.
    * `credit/gated_off/<agent>`: share of the credit, in absolute value, that the agent's closed gates withheld from
      parents.
    * `credit/mis_credited/<agent>`: share of trained steps with an ok score (weight 0 included) whose advantage is
      negative although all their ok scores are 1, or positive although one is below 1.
    * `credit/reach/<agent>`: share of its plays in which a signal reaches the agent, see `reach`.
    * `groups/singletons`: groups of one trajectory; their steps backed off.
    * `groups/zero_variance`: groups, after back-off, whose credits are all the same.
    * `groups/no_baseline`: trained steps that were alone at every level.
    * `groups/masked_steps`: steps left out of training.

    Steps of masked trajectories count in `groups/masked_steps` only.
    """
    batch, trained_S = assignment.batch, assignment.trained_S
    kept_S = ~assignment.masked_N[batch.trajectory_of_step]
    agent_S, names = batch.agent_of_step, batch.agent_names
    result: dict[str, float] = {}

    judged_S = kept_S & (assignment.scored_S | assignment.failed_S)
    if judged_S.any():
        result["propagation/pass_rate"] = float(assignment.gate_open_S[judged_S].mean())

    has_parent_S = np.bincount(batch.edge_child, minlength=batch.n_steps) > 0
    handed_S = np.abs(assignment.own_S + assignment.received_S)
    ok_SK = batch.score_status == OK
    right_S = (~ok_SK | (np.where(ok_SK, batch.scores, 1.0) >= RIGHT)).all(axis=1)
    wrong_way_S = np.where(right_S, assignment.advantage_S < 0, assignment.advantage_S > 0)
    measured_S = trained_S & ok_SK.any(axis=1)

    shares = {
        "propagation/pass_rate": (assignment.gate_open_S, judged_S),
        "credit/mean": (assignment.credit_S, trained_S),
        "credit/mis_credited": (wrong_way_S, measured_S),
    }
    for name, (values_S, over_S) in shares.items():
        sums, counts = _by_agent(values_S, over_S, agent_S, len(names))
        result |= {f"{name}/{names[a]}": float(sums[a] / counts[a]) for a in np.flatnonzero(counts)}

    stopped, _ = _by_agent(np.abs(assignment.stopped_S), kept_S & has_parent_S, agent_S, len(names))
    handed, _ = _by_agent(handed_S, kept_S & has_parent_S, agent_S, len(names))
    result |= {f"credit/gated_off/{names[a]}": float(stopped[a] / handed[a]) for a in np.flatnonzero(handed)}
    result |= {f"credit/reach/{name}": share for name, share in reach(assignment).items()}

    result["groups/singletons"] = float(assignment.singletons)
    result["groups/zero_variance"] = float(len(np.unique(assignment.group_S[assignment.tied_S])))
    result["groups/no_baseline"] = float((trained_S & (assignment.group_S < 0)).sum())
    result["groups/masked_steps"] = float((~trained_S).sum())
    return result


def reach(assignment: Assignment) -> dict[str, float]:
    """For each agent, the share of its plays in which a signal reaches at least one of its steps.

    A signal is something that depends on the play: a score of the step's own, the outcome, or credit from a child that
    has one, through its open gate. What is the same whatever the agents do (nothing scored, nothing handed on, a weight
    of 0, a mean that stands in for a failed score) is none.
    """
    batch = assignment.batch
    kept_S = ~assignment.masked_N[batch.trajectory_of_step]
    key_S = batch.agent_of_step * batch.n_trajectories + batch.trajectory_of_step
    agents = len(batch.agent_names)
    plays = np.unique(key_S[kept_S]) // batch.n_trajectories
    reached = np.unique(key_S[kept_S & assignment.reached_S]) // batch.n_trajectories
    plays_A, reached_A = np.bincount(plays, minlength=agents), np.bincount(reached, minlength=agents)
    return {batch.agent_names[a]: float(reached_A[a] / plays_A[a]) for a in np.flatnonzero(plays_A)}


def unreached_agents(assignment: Assignment) -> tuple[str, ...]:
    """Agents that no signal reaches in any play of the batch: under this configuration they do not learn."""
    return tuple(agent for agent, share in reach(assignment).items() if share == 0.0)


def _by_agent(values_S: Floats | Bools, over_S: Bools, agent_S: Ints, agents: int) -> tuple[Floats, Floats]:
    """Sum of `values_S` over the steps in `over_S`, and their number, for each agent."""
    sums = np.bincount(agent_S[over_S], values_S[over_S].astype(np.float64), agents).astype(np.float64)
    return sums, np.bincount(agent_S[over_S], minlength=agents).astype(np.float64)
