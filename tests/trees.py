"""A rollout with a tree of branches, for tests of everything that must not take branches for rollouts."""

from creditflow.credit.trees import KEY
from creditflow.data import Trajectory
from creditflow.rollout.branching import REFUSED
from tests.builders import make_trajectory, step

RETURNS = {"t": 1.0, "t~0.1": 0.0, "t~1.0": 1.0, "t~1.1": 1.0}
"""The outcomes below the decision at the second step of `t`: Qbar is 1/2 and 1."""


def tree_of_branches(text: str = "a response", reason: str = "another prompt") -> list[Trajectory]:
    """Two rollouts of a task, `t` and `other`; `t` has two alternatives of two leaves, and a third that was refused.

    `text`: the response of alternative 1. `reason`: why alternative 2 was refused.
    """
    rollouts = [_made("t", 1.0, first=None), _made("other", 0.0, first=None)]
    rollouts[0].info[KEY] = {"at": 1, "probability": 0.25, "weight": 1.0}
    branches = [
        _branch("t~0.1", 0, 1, first=2, of="t.2"),
        _branch("t~1.0", 1, 0, first=1, of="t.1"),
        _branch("t~1.1", 1, 1, first=2, of="t~1.0.2"),
        _branch("t~2.0", 2, 0, first=None, of="t.1"),
    ]
    for branch in branches[1:3]:
        branch.steps[1].response = text
    branches[3].status, branches[3].outcome = "failed", None
    branches[3].info |= {REFUSED: "t.1", "error": reason}
    return [*rollouts, *branches]


def _made(id: str, outcome: float, first: int | None, of: str = "") -> Trajectory:
    agents = ("planner", "executor", "verifier")
    steps = [step(agent, 1.0, tokens=2, response=f"{agent} of {id}") for agent in agents]
    if first is not None:
        steps[first].more["branch_of"] = of
    for place in range(0 if first is None else first):
        steps[place].more["response"] = f"{agents[place]} of t"
    return make_trajectory(id, steps, outcome)


def _branch(id: str, alternative: int, continuation: int, first: int | None, of: str) -> Trajectory:
    made = _made(id, RETURNS.get(id, 0.0), first, of)
    made.info[KEY] = {"of": "t", "alternative": alternative, "continuation": continuation}
    return made
