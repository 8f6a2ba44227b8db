"""JSON of a trajectory's branches: its decision, the alternatives with their values, and the place of a branch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from creditflow.credit import Assignment, CreditOptions
from creditflow.credit.decompose import outcomes
from creditflow.credit.records import PROPAGATION_RULES
from creditflow.credit.trees import KEY, Decision, MeasuredDecision, branch_entries, measure_branches, trees_of
from creditflow.data import TrajectoryBatch
from creditflow.reports.text import cut
from creditflow.rollout.branching import REFUSED

_RESPONSE = 400
"""Maximum characters of an alternative's response; its step has all of it."""
_REASON = 300


def branch_of(batch: TrajectoryBatch, n: int) -> dict[str, Any] | None:
    """The place of a branch in its tree; None for a rollout.

    `first` is the index of its first new step, None for a refused branch; `refused` the reason, None for others.
    """
    if (entry := branch_entries(batch)[n]) is None:
        return None
    info, trees = batch.trajectory_info[n], trees_of(batch)
    grown = trees is not None and trees.root_N[n] != n
    return {
        "of": entry["of"],
        "alternative": entry["alternative"],
        "continuation": entry["continuation"],
        "first": int(trees.new_N[n]) if trees is not None and grown else None,
        "refused": cut(str(info.get("error", "")), _REASON) if REFUSED in info else None,
    }


def copied_steps(batch: TrajectoryBatch, n: int) -> dict[int, str]:
    """The copies in a branch: the index of each, and the id of the step that it repeats and that was trained."""
    trees = trees_of(batch)
    if trees is None or trees.root_N[n] == n:
        return {}
    decision = _decision(batch, int(trees.root_N[n]))
    assert decision is not None, "a branch has a decision"
    first = next(leaves[0] for leaves in decision.leaves if n in leaves)
    begins = [int(np.searchsorted(batch.trajectory_of_step, trajectory)) for trajectory in (decision.root, first)]
    return {i: batch.step_ids[begins[i >= decision.at] + i] for i in range(int(trees.new_N[n]))}


def _decision(batch: TrajectoryBatch, root: int) -> Decision | None:
    trees = trees_of(batch)
    return None if trees is None else next((one for one in trees.decisions if one.root == root), None)


def decision_of(batch: TrajectoryBatch, a: Assignment | None, root: int) -> dict[str, Any] | None:
    """The decision at which a rollout branched, with its alternatives; None without one.

    `mean` is Qbar, the mean return of an alternative's leaves. An untrained alternative has no `advantage`.
    """
    leaves = _leaves(batch, batch.trajectory_ids[root])
    if not leaves:
        return None
    facts = batch.trajectory_info[root][KEY]
    measured, at = _measured(batch, a, root), int(facts["at"])
    leaves.setdefault(0, {})[0] = root
    step = int(np.searchsorted(batch.trajectory_of_step, root)) + at
    return {
        "of": batch.trajectory_ids[root],
        "at": at,
        "step_id": batch.step_ids[step],
        "agent": batch.agent_names[batch.agent_of_step[step]],
        "probability": float(facts["probability"]),
        "weight": float(facts["weight"]),
        "trained": a is not None and PROPAGATION_RULES[a.options.propagation].branches,
        "compared": measured is not None,
        "alternatives": [
            _alternative(batch, a, measured, at, number, dict(sorted(leaves[number].items())))
            for number in sorted(leaves)
        ],
    }


def _leaves(batch: TrajectoryBatch, root_id: str) -> dict[int, dict[int, int]]:
    """The branches of a rollout, refused ones included, by alternative and continuation."""
    leaves: dict[int, dict[int, int]] = {}
    for n, entry in enumerate(branch_entries(batch)):
        if entry is not None and entry["of"] == root_id:
            leaves.setdefault(entry["alternative"], {})[entry["continuation"]] = n
    return leaves


def _measured(batch: TrajectoryBatch, a: Assignment | None, root: int) -> MeasuredDecision | None:
    outcome = outcomes(batch, CreditOptions() if a is None else a.options)
    found = measure_branches(batch, outcome.value_S, outcome.known_S)
    return None if found is None else next((one for one in found.decisions if one.decision.root == root), None)


def _alternative(
    batch: TrajectoryBatch,
    a: Assignment | None,
    measured: MeasuredDecision | None,
    at: int,
    number: int,
    leaves: Mapping[int, int],
) -> dict[str, Any]:
    step = _new_step(batch, leaves[0], at) if 0 in leaves else None
    place = None if measured is None or step not in measured.rows else measured.rows.index(step)
    returns: dict[int, float] = {}
    if measured is not None and place is not None:
        returns = dict(zip(measured.decision.leaves[place], measured.returns[place], strict=True))
    made: dict[str, Any] = {
        "number": number,
        "step_id": None if step is None else batch.step_ids[step],
        "response": None if step is None else cut(batch.responses[step], _RESPONSE),
        "mean": None if measured is None or place is None else measured.values[place],
        "sub_reward": None,
        "credit": None,
        "advantage": None,
        "leaves": [_leaf(batch, n, returns) for n in leaves.values()],
    }
    if a is not None and step is not None:
        made["sub_reward"] = float(a.sub_reward_S[step]) if a.scored_S[step] else None
        if a.trained_S[step]:
            made |= {"credit": float(a.credit_S[step]), "advantage": float(a.advantage_S[step])}
    return made


def _new_step(batch: TrajectoryBatch, n: int, at: int) -> int | None:
    """The step of a trajectory at the decision; None if the branch was refused before it."""
    trees = trees_of(batch)
    if branch_entries(batch)[n] is not None and (trees is None or trees.root_N[n] == n):
        return None
    return int(np.searchsorted(batch.trajectory_of_step, n)) + at


def _leaf(batch: TrajectoryBatch, n: int, returns: Mapping[int, float]) -> dict[str, Any]:
    info, score = batch.trajectory_info[n], batch.outcome_scores[n]
    reason = ""
    if n not in returns:
        scored = "not scored" if score is None else f"{score.status} {score.reason}".strip()
        reason = f"refused: {info['error']}" if REFUSED in info else str(info.get("error", scored))
    return {
        "trajectory_id": batch.trajectory_ids[n],
        "return": returns.get(n),
        "reason": cut(reason, _REASON),
    }
