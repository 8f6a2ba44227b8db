"""The gradient of replay, computed by enumerating groups of trajectories, decisions and branches.

As in test_gradient.py, the expected gradient is a finite sum, here over all ordered groups of two recorded
trajectories, all draws of a decision in each, and all branches there. The loss weighs a step by its share of leaves.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np
import pytest

from creditflow.credit import Assignment, CreditOptions, assign
from creditflow.credit.branch_points import PREFERENCES, branch_cost, choose_branch_points
from creditflow.credit.trees import KEY
from creditflow.data import Floats, Trajectory
from tests.builders import batch_of, make_trajectory, step
from tests.credit.test_gradient import (
    POLICY,
    REWARD,
    Path,
    chance,
    cosine,
    exactly,
    grad_log,
    gradient,
    length,
    objective,
    outcome,
    parameters,
    paths,
    probability,
)


def outcome_of(path: Path, position: int) -> float:
    return outcome(path)


TRUE = gradient(POLICY, outcome_of)


@dataclass(frozen=True)
class Tree:
    """A recorded trajectory, its decision, and one possible set of branches."""

    path: Path
    at: int | None
    leaves: tuple[tuple[Path, ...], ...] = ()
    """The continuations of each alternative; the recorded path is the first of the first."""
    chance: float = 1.0
    """The probability of the branches, given the path and the decision."""


def continued(prefix: Path) -> list[tuple[Path, float]]:
    """All continuations of a prefix, with their probabilities."""
    found = [path for path in paths(POLICY) if path[: len(prefix)] == prefix]
    return [(path, prod(probability(POLICY, choice) for choice in path[len(prefix) :])) for path in found]


def trees(path: Path, at: int, alternatives: int, continuations: int) -> Iterator[Tree]:
    """All trees with the decision `at` of a recorded path."""

    def of_alternative(first: Path, count: int) -> list[tuple[tuple[Path, ...], float]]:
        if len(first) == at + 1:  # nothing is left to sample
            return [((first,), 1.0)]
        ways = product(continued(first[: at + 1]), repeat=count)
        return [((first, *(one for one, _ in way)), prod(p for _, p in way)) for way in ways]

    recorded = of_alternative(path, continuations - 1)
    fresh = [
        (leaves, p * q) for first, p in continued(path[:at]) for leaves, q in of_alternative(first, continuations - 1)
    ]
    for first, *others in product(recorded, *[fresh] * (alternatives - 1)):
        yield Tree(path, at, tuple(leaves for leaves, _ in (first, *others)), prod(p for _, p in (first, *others)))


def records(tree: Tree, name: str, task: str, weight: float, scores: bool) -> list[tuple[Trajectory, Path]]:
    """The trajectories of a tree, the recorded one first."""

    def made(id: str, path: Path, new: int | None = None) -> tuple[Trajectory, Path]:
        steps = [
            step(
                f"agent of {task}",
                REWARD[choice] if scores else None,
                prompt=choice[0],
                tokens=1,
                branch_of="x" if p == new else None,
            )
            for p, choice in enumerate(path)
        ]
        return make_trajectory(id, steps, outcome(path), task=task), path

    recorded = made(name, tree.path)
    if tree.at is None:
        return [recorded]
    recorded[0].info[KEY] = {"at": tree.at, "probability": 0.5, "weight": weight}
    found = [recorded]
    for i, leaves in enumerate(tree.leaves):
        for j, path in enumerate(leaves):
            if (i, j) != (0, 0):
                branch = made(f"{name}~{i}.{j}", path, tree.at + (j > 0))
                branch[0].info[KEY] = {"of": name, "alternative": i, "continuation": j}
                found.append(branch)
    return found


Selection = Callable[[Sequence[Path]], list[list[tuple[float, float]]]]
"""From the paths of a group to (probability, weight) of a decision at each step of each."""


def expected_gradient(
    selection: Selection, alternatives: int, continuations: int, *, scores: bool = False, **more: object
) -> Floats:
    """The expected gradient of training on groups of two recorded trajectories with branches."""
    chosen = {"adv_estimator": "rloo", "propagation": "replay", "group_by": "task_agent_turn", **more}
    cases: list[tuple[float, list[list[tuple[Trajectory, Path]]]]] = []
    for group in product(paths(POLICY), repeat=2):
        drawn = selection(group)
        ways = []
        for path, places in zip(group, drawn, strict=True):
            way = [(1.0 - sum(p for p, _ in places), Tree(path, None), 1.0)]
            for at, (p, weight) in enumerate(places):
                way += [(p * tree.chance, tree, weight) for tree in trees(path, at, alternatives, continuations)]
            ways.append([one for one in way if one[0] > 0])
        for case in product(*ways):
            name = f"q{len(cases)}"
            chance_of_case = prod(chance(POLICY, path) for path in group) * prod(p for p, _, _ in case)
            made = [records(tree, f"{name}-{i}", name, weight, scores) for i, (_, tree, weight) in enumerate(case)]
            cases.append((chance_of_case, made))
    flat = [one for _, made in cases for one in made]
    a = assign(
        batch_of(*(trajectory for rows in flat for trajectory, _ in rows)),
        CreditOptions(**{"propagation": "threshold", **chosen}),
    )
    within_task = {chosen["group_by"], "task_agent", "decision"}
    assert {Assignment.level_names[level] for level in np.unique(a.level_S[a.trained_S])} <= within_task
    total, s = np.zeros(len(parameters(POLICY))), 0
    pushed_S = a.share_S * a.advantage_S
    grads = {choice: grad_log(POLICY, choice) for path in paths(POLICY) for choice in path}
    for chance_of_case, made in cases:
        for rows in made:
            for _, path in rows:
                for choice in path:
                    total += chance_of_case / 2 * pushed_S[s] * grads[choice]
                    s += 1
    assert s == len(pushed_S)
    return total


# ---- ways to draw a decision -----------------------------------------------------------------------------------------


def with_weights(place: Callable[[Path], list[float]], rate: float) -> Selection:
    """Draw by `place` (sums to 1 over a path), weighted by the inverse, from the mean of the other paths."""

    def selection(group: Sequence[Path]) -> list[list[tuple[float, float]]]:
        drawn = []
        for i, path in enumerate(group):
            others = [place(other) for j, other in enumerate(group) if j != i]
            row = []
            for at, share in enumerate(place(path)):
                there = [values[at] for values in others if at < len(values)]
                every = [value for values in others for value in values]
                row.append((rate * share, float(np.mean(there or every)) / share))
            drawn.append(row)
        return drawn

    return selection


def uniform(path: Path) -> list[float]:
    return [1.0 / len(path)] * len(path)


def by_outcome(path: Path) -> list[float]:
    """Prefer the first step of a bad trajectory, and the last step of a good one."""
    first = 0.8 if outcome(path) < 0.5 else 0.3
    return [first, 1.0 - first] if len(path) > 1 else [1.0]


def unweighted(place: Callable[[Path], list[float]], rate: float) -> Selection:
    return lambda group: [[(rate * share, 1.0) for share in place(path)] for path in group]


def first_step(group: Sequence[Path]) -> list[list[tuple[float, float]]]:
    """Always branch at the first step: no later event decides."""
    return [[(1.0, 1.0)] + [(0.0, 1.0)] * (len(path) - 1) for path in group]


def test_gradient_of_the_outcome_equals_central_differences():
    def mean_outcome(policy):
        return sum(chance(policy, path) * outcome(path) for path in paths(policy))

    def moved(state: str, action: str, by: float):
        return {**POLICY, state: {**POLICY[state], action: POLICY[state][action] + by}}

    h = 1e-5
    slopes = [(mean_outcome(moved(*at, h)) - mean_outcome(moved(*at, -h))) / (2 * h) for at in parameters(POLICY)]
    assert pytest.approx(np.array(slopes), abs=1e-9) == TRUE
    assert objective(POLICY) > 0


@pytest.mark.parametrize(("alternatives", "continuations"), [(2, 1), (3, 1), (2, 2)])
def test_replay_at_the_first_step_equals_the_gradient(alternatives, continuations):
    assert expected_gradient(first_step, alternatives, continuations) == exactly(TRUE)


@pytest.mark.parametrize("place", [uniform, by_outcome])
@pytest.mark.parametrize(("alternatives", "continuations"), [(2, 1), (2, 2)])
def test_replay_with_inverse_probabilities_is_unbiased(place, alternatives, continuations):
    assert expected_gradient(with_weights(place, 0.75), alternatives, continuations) == exactly(TRUE)


@pytest.mark.parametrize("group_by", ["task", "task_agent"])
def test_replay_is_unbiased_in_other_groups(group_by):
    assert expected_gradient(with_weights(by_outcome, 0.75), 2, 1, group_by=group_by) == exactly(TRUE)


def test_replay_pays_own_scores_without_bias():
    found = expected_gradient(with_weights(by_outcome, 0.75), 2, 1, scores=True, sub_reward_origin=0.0, w_o=0.5)
    assert found == exactly(gradient(POLICY, lambda path, position: REWARD[path[position]] + 0.5 * outcome(path)))


def drawn_by(at: str) -> Selection:
    """The probabilities and weights of `choose_branch_points`, within a budget that depends on the group."""

    def selection(group: Sequence[Path]) -> list[list[tuple[float, float]]]:
        rows = [
            make_trajectory(
                str(i),
                [
                    step("solver", tokens=k + 1, logprobs=(-0.3 - k * outcome(path),) * (k + 1))
                    for k in range(len(path))
                ],
                outcome(path),
            )
            for i, path in enumerate(group)
        ]
        batch, every_S = batch_of(*rows), np.ones(sum(map(len, group)), dtype=np.bool_)
        points = choose_branch_points(
            batch,
            every_S,
            at,
            branch_cost(batch, 2, 1),
            lambda tokens: 0.6 * tokens,
            np.random.default_rng(0),
            np.where(batch.turn_of_step == 0, batch.outcome[batch.trajectory_of_step], 0.4),
        )
        pairs = list(zip(points.probability_S.tolist(), points.weight_S.tolist(), strict=True))
        return [pairs[: len(group[0])], pairs[len(group[0]) :]]

    return selection


@pytest.mark.parametrize("at", PREFERENCES)
def test_drawn_branch_points_are_unbiased(at):
    group = (paths(POLICY)[1], paths(POLICY)[4])
    assert {len(path) for path in group} == {2}
    if at in ("uncertain", "disputed"):
        assert drawn_by(at)(group)[0] != drawn_by(at)(group)[1]
    assert expected_gradient(drawn_by(at), 2, 1) == exactly(TRUE)


def fitted_to_the_batch(group: Sequence[Path]) -> list[list[tuple[float, float]]]:
    """As `drawn_by("disputed")`, with the posterior of a model that is fitted to the group itself, as in a run."""
    rows = [
        make_trajectory(
            str(i),
            [step("solver", REWARD[choice], tokens=k + 1) for k, choice in enumerate(path)],
            outcome(path),
        )
        for i, path in enumerate(group)
    ]
    batch = batch_of(*rows)
    model = CreditOptions(propagation="none", score_model="noisy_and", adv_estimator="rloo")
    points = choose_branch_points(
        batch,
        np.ones(batch.n_steps, dtype=np.bool_),
        "disputed",
        branch_cost(batch, 2, 1),
        lambda tokens: 0.6 * tokens,
        np.random.default_rng(0),
        assign(batch, model).harmless_S,
    )
    pairs = list(zip(points.probability_S.tolist(), points.weight_S.tolist(), strict=True))
    return [pairs[: len(group[0])], pairs[len(group[0]) :]]


# ---- biased ----------------------------------------------------------------------------------------------------------


def only_bad(path: Path) -> list[float]:
    """Branch at the first step of a trajectory that fails, and nowhere else."""
    return [float(outcome(path) < 0.5)] + [0.0] * (len(path) - 1)


BIASED = {uniform: (0.9998, 1.0595), by_outcome: (0.9997, 1.0669), only_bad: (0.9910, 0.8367)}
"""Cosine to the true gradient, and relative length, of decisions without weights that later events decide about."""


@pytest.mark.parametrize("place", BIASED)
def test_replay_without_weights_has_the_recorded_bias(place):
    found = expected_gradient(unweighted(place, 0.75), 2, 1)
    assert (cosine(found, TRUE), length(found, TRUE)) == pytest.approx(BIASED[place], abs=5e-4)


def test_disputed_draws_of_a_fitted_model_have_a_small_bias():
    found = expected_gradient(fitted_to_the_batch, 2, 1)
    assert np.abs(found - TRUE).max() / np.abs(TRUE).max() == pytest.approx(0.0060, abs=2e-4)
    assert (cosine(found, TRUE), length(found, TRUE)) == pytest.approx((0.99999, 1.0005), abs=1e-4)
