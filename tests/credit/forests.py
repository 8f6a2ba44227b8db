"""Random recorded trajectories with branches, as trajectories and as the trees of the oracle."""

import random

from creditflow.credit.trees import KEY
from tests.builders import make_trajectory, step

LEAST = 2
"""Steps of the shortest trajectory. Every trajectory has the same agents at the same turns up to its end."""
AGENTS = ("planner", "solver", "solver", "checker")


def forest(seed, *, weights=(1.0,), failures=0.0, tasks=2, rollouts=3):
    """(trajectories, trees): see `tests/oracle/trees.py`. `failures`: the share of branches that fail."""
    rng = random.Random(seed)
    recorded, branches, trees = [], [], []
    for task in range(tasks):
        for n in range(rollouts):
            root = _records(rng, f"{task}.{n}", f"q{task}", [])
            recorded.append(root)
            tree = {"task": task, "path": _nodes(root), "outcome": root.outcome.value, "weight": 1.0, "at": None}
            if rng.random() < 0.7:
                grown = _branches(rng, root, rng.choice(weights), failures)
                branches += grown[0]
                tree |= grown[1]
            trees.append(tree)
    return [*recorded, *branches], trees


def _records(rng, id, task, kept, new=None):
    """A trajectory that keeps the steps `kept`, given as (agent, score, tokens)."""
    length = max(len(kept) + (new is not None), rng.randint(LEAST, len(AGENTS)))
    made = [*kept, *((agent, rng.randrange(5) / 4, rng.randint(1, 3)) for agent in AGENTS[len(kept) : length])]
    steps = [
        step(agent, score, tokens=tokens, branch_of="x" if place == new else None, prompt=f"{task} {agent}")
        for place, (agent, score, tokens) in enumerate(made)
    ]
    outcome = rng.randrange(5) / 4
    if rng.random() < 0.4:
        outcome = 1.0
    return make_trajectory(id, steps, outcome, task=task)


def _nodes(trajectory, kept=()):
    made = [
        {"id": one.id, "agent": one.agent, "turn": one.turn, "own": one.scores["f"].value - 1.0}
        for one in trajectory.steps
    ]
    return [*kept, *made[len(kept) :]]


def _kept(trajectory, count):
    return [(one.agent, one.scores["f"].value, len(one.response_ids)) for one in trajectory.steps[:count]]


def _branches(rng, root, weight, failures):
    at, path = rng.randrange(len(root.steps)), _nodes(root)
    alternatives, continuations = rng.randint(2, 3), rng.randint(1, 2)
    made, leaves = [], []
    for i in range(alternatives):
        first, kept, below = root, path[:at], [(path[at:], root.outcome.value)]
        for j in range(continuations):
            if i == j == 0:
                continue
            if j and len(first.steps) == at + 1:  # nothing is left to sample
                continue
            new = at + (j > 0)
            branch = _records(rng, f"{root.id}~{i}.{j}", root.uid, _kept(first if j else root, new), new)
            branch.info[KEY] = {"of": root.id, "alternative": i, "continuation": j}
            if len(branch.steps) <= new:
                continue
            made.append(branch)
            if j == 0:
                first, below = branch, []
                kept = path[:at]
            nodes = _nodes(branch, kept if j == 0 else [*path[:at], below_first(below, path, at)])
            if rng.random() < failures:
                branch.status = "failed"
                if j == 0:
                    break
                continue
            below.append((nodes[at:], branch.outcome.value))
        leaves.append(below)
    root.info[KEY] = {"at": at, "probability": 0.5, "weight": weight}
    known = [below for below in leaves if below]
    if len(known) < 2:
        return made, {}
    return made, {"at": at, "weight": weight, "alternatives": known}


def below_first(below, path, at):
    """The node of the alternative that further continuations share."""
    return below[0][0][0] if below else path[at]
