"""The gradient that the advantages produce, computed by enumerating all groups of trajectories of a two-turn task.

The policy is a softmax over one logit per state and action. The expected gradient of training is then a finite sum
over all ordered groups of n trajectories: the group's probability times
`1/n * sum over trajectories and steps of A * grad log pi`. The tests compare it with the gradient of J, the expected
sum of own rewards and outcome, which is another finite sum.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import exp, prod

import numpy as np
import pytest

from creditflow.credit import CreditOptions, assign
from creditflow.credit.groups import LEVEL_NAMES
from creditflow.data import Floats, TrajectoryBatch
from tests.builders import batch_of, credit_options, make_trajectory, step

# ---- the task --------------------------------------------------------------------------------------------------------

Choice = tuple[str, str]
"""A state and the action taken there."""
Path = tuple[Choice, ...]
"""A trajectory: `stop` ends it in the first turn, `a` and `b` lead to a second."""
Policy = Mapping[str, Mapping[str, float]]
"""A logit for each action of each state."""

POLICY: Policy = {
    "start": {"stop": 0.2, "a": 0.5, "b": -0.3},
    "after a": {"c": 0.4, "d": -0.1},
    "after b": {"c": -0.2, "d": 0.3},
}
NEVER_STOPS: Policy = {**POLICY, "start": {"a": 0.5, "b": -0.3}}

REWARD: dict[Choice, float] = {
    ("start", "stop"): 0.65,
    ("start", "a"): 0.7,
    ("start", "b"): 0.3,
    ("after a", "c"): 0.95,
    ("after a", "d"): 0.25,
    ("after b", "c"): 0.8,
    ("after b", "d"): 0.4,
}
# One trajectory has low sub-rewards at both turns and a good outcome: a case in which a gate errs.
OUTCOME: dict[str, float] = {"stop": 0.75, "a c": 1.0, "a d": 0.1, "b c": 0.2, "b d": 0.9}


def paths(policy: Policy) -> list[Path]:
    """All possible trajectories."""
    whole: list[Path] = []
    for action in policy["start"]:
        first = ("start", action)
        then = policy.get(f"after {action}")
        whole += [(first,)] if then is None else [(first, (f"after {action}", second)) for second in then]
    return whole


def outcome(path: Path) -> float:
    return OUTCOME[" ".join(action for _, action in path)]


def probability(policy: Policy, choice: Choice) -> float:
    state, action = choice
    return exp(policy[state][action]) / sum(map(exp, policy[state].values()))


def chance(policy: Policy, path: Path) -> float:
    return prod(probability(policy, choice) for choice in path)


def parameters(policy: Policy) -> list[Choice]:
    return [(state, action) for state in policy for action in policy[state]]


def grad_log(policy: Policy, choice: Choice) -> Floats:
    """d log pi(choice) / d logit, for every logit."""
    return np.array(
        [0.0 if at[0] != choice[0] else float(at == choice) - probability(policy, at) for at in parameters(policy)]
    )


# ---- gradients -------------------------------------------------------------------------------------------------------

Return = Callable[[Path, int], float]
"""The return of the step at a position: its own reward plus all later rewards that count."""


def return_to_go(path: Path, position: int, origin: float = 0.0) -> float:
    return sum(REWARD[choice] - origin for choice in path[position:]) + outcome(path)


def gated_return(path: Path, position: int) -> float:
    """The return without rewards from behind a step of reward 0.5 or less."""
    last = REWARD[path[-1]] + outcome(path)
    if position == len(path) - 1:
        return last
    return REWARD[path[position]] + (last if REWARD[path[-1]] > 0.5 else 0.0)


def objective(policy: Policy) -> float:
    return sum(chance(policy, path) * return_to_go(path, 0) for path in paths(policy))


def gradient(policy: Policy, of: Return = return_to_go) -> Floats:
    """The policy gradient, summed over all trajectories."""
    return sum(
        chance(policy, path) * of(path, position) * grad_log(policy, choice)
        for path in paths(policy)
        for position, choice in enumerate(path)
    )


def true_value(policy: Policy, state: str, of: Return = return_to_go) -> float:
    """V(state): the mean return from the state."""
    there = [(path, p) for path in paths(policy) for p, choice in enumerate(path) if choice[0] == state]
    weight = [chance(policy, path) for path, _ in there]
    return sum(w * of(path, p) for w, (path, p) in zip(weight, there, strict=True)) / sum(weight)


Group = tuple[Path, ...]
Advantages = Callable[[Sequence[Group]], Sequence[float]]
"""A function from groups of trajectories to the advantage of every step, in order."""


def expected_gradient(policy: Policy, n: int, advantages: Advantages) -> Floats:
    """The expected gradient of training on groups of n trajectories."""
    groups = list(product(paths(policy), repeat=n))
    advantage = iter(advantages(groups))
    total = np.zeros(len(parameters(policy)))
    for group in groups:
        chance_of_group = prod(chance(policy, path) for path in group)
        for path in group:
            for choice in path:
                total += chance_of_group / n * next(advantage) * grad_log(policy, choice)
    assert next(advantage, None) is None
    return total


def batch(groups: Sequence[Group]) -> TrajectoryBatch:
    """A batch with a separate task and a separate agent for each group.

    Comparisons and substitutes across groups would be wrong, because the batch has each group once, whatever its
    probability.
    """
    return batch_of(
        *(
            make_trajectory(
                f"{g}-{i}",
                [step(f"solver{g}", REWARD[choice], prompt=choice[0], tokens=1) for choice in path],
                outcome(path),
                task=f"q{g}",
            )
            for g, group in enumerate(groups)
            for i, path in enumerate(group)
        )
    )


def options(**more: object) -> CreditOptions:
    """Options under which the advantages give the gradient of J; the tests change some of them."""
    chosen = {
        "adv_estimator": "rloo",
        "propagation": "discounted",
        "gamma": 1.0,
        "sub_reward_origin": 0.0,
        "outcome_to": "answer",
        "group_by": "task_agent_turn",
    }
    return credit_options(**{**chosen, **more})


def assigned(chosen: CreditOptions) -> Advantages:
    def advantages(groups: Sequence[Group]) -> Sequence[float]:
        a = assign(batch(groups), chosen)
        within_task = [LEVEL_NAMES.index(level) for level in (chosen.group_by, "task_agent")]
        # Frozen steps are not trained, and other steps may lose all their peers: no baseline (-1), no advantage.
        found = a.groups.level_S >= 0
        assert np.isin(a.groups.level_S[found], within_task).all()
        assert found.all() or a.credit.frozen_S is not None
        assert not a.advantage.advantage_S[~found].any()
        return a.advantage.advantage_S.tolist()

    return advantages


def cosine(x: Floats, y: Floats) -> float:
    return float(x @ y / np.linalg.norm(x) / np.linalg.norm(y))


def length(x: Floats, of: Floats) -> float:
    return float(np.linalg.norm(x) / np.linalg.norm(of))


def exactly(expected: Floats) -> object:
    return pytest.approx(expected, rel=0, abs=1e-12)


@pytest.mark.parametrize("policy", [POLICY, NEVER_STOPS])
def test_gradient_of_j_equals_central_differences(policy):
    def moved(state: str, action: str, by: float) -> Policy:
        return {**policy, state: {**policy[state], action: policy[state][action] + by}}

    h = 1e-5
    slopes = [(objective(moved(*at, h)) - objective(moved(*at, -h))) / (2 * h) for at in parameters(policy)]
    assert gradient(policy) == pytest.approx(np.array(slopes), abs=1e-9)
    assert np.linalg.norm(gradient(policy)) > 0.1
    assert sum(chance(policy, path) for path in paths(policy)) == pytest.approx(1.0)


# ---- unbiased --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(
    "more",
    [
        {"outcome_to": "all"},
        *({"group_by": key} for key in ("task_agent_turn", "task_agent", "task_agent_state", "task")),
    ],
)
def test_rloo_with_open_gates_equals_the_gradient_of_j(n, more):
    found = expected_gradient(POLICY, n, assigned(options(**more)))
    assert found == exactly(gradient(POLICY))


@pytest.mark.parametrize("n", [2, 3])
def test_origin_changes_the_objective_but_stays_exact(n):
    found = expected_gradient(POLICY, n, assigned(options(sub_reward_origin=1.0)))
    assert found == exactly(gradient(POLICY, lambda path, position: return_to_go(path, position, origin=1.0)))
    assert cosine(found, gradient(POLICY)) < 0.9


@pytest.mark.parametrize("n", [2, 3])
def test_unscaled_grpo_at_fixed_length_shrinks_the_gradient(n):
    chosen = options(adv_estimator="grpo", norm_adv_by_std_in_grpo=False)
    found = expected_gradient(NEVER_STOPS, n, assigned(chosen))
    assert found == exactly((n - 1) / n * gradient(NEVER_STOPS))


# ---- biases and their size -------------------------------------------------------------------------------------------

GATED = {"propagation": "threshold", "propagation_threshold": 0.5}
DEFAULTS = {
    "adv_estimator": "grpo",
    "propagation": "threshold",
    "gamma": 0.99,
    "sub_reward_origin": 1.0,
    "outcome_to": "all",
}
PER_TURN = {"propagation": "mt_grpo", "adv_estimator": "relative"}
"""The construction of verl's issue 7244."""
GROUP = 3
MOVED: dict[str, tuple[dict[str, object], float, float]] = {
    "own trajectory in the mean": ({"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False}, 0.9983, 0.6215),
    "std scaling": ({"adv_estimator": "grpo"}, 0.9885, 0.7408),
    "closed gates, cut": (GATED, 0.9091, 1.1458),
    "closed gates, cut, outcome to all": ({**GATED, "outcome_to": "all"}, 0.9894, 0.9906),
    "closed gates, freeze": ({**GATED, "on_closed_gate": "freeze"}, 0.9029, 1.3860),
    "the defaults, in groups of the task": (DEFAULTS, 0.9178, 0.8923),
    "turns normalised one by one": (PER_TURN, 0.9495, 1.8882),
}
"""Changes to `options()`, cosine to the gradient of J (with the origin in force), and length relative to it."""


@pytest.mark.parametrize("name", MOVED)
def test_gradient_bias_has_the_recorded_size(name):
    more, direction, size = MOVED[name]
    chosen = options(**more)
    true = gradient(POLICY, lambda path, position: return_to_go(path, position, chosen.propagation.sub_reward_origin))
    found = expected_gradient(POLICY, GROUP, assigned(chosen))
    assert (cosine(found, true), length(found, true)) == pytest.approx((direction, size), abs=5e-4)


@pytest.mark.parametrize("n", [2, 3])
def test_closed_gates_give_the_gradient_of_the_gated_return(n):
    found = expected_gradient(POLICY, n, assigned(options(**GATED)))
    assert found == exactly(gradient(POLICY, gated_return))
    at_the_end = [state != "start" for state, _ in parameters(POLICY)]
    assert found[at_the_end] == exactly(gradient(POLICY)[at_the_end])


# ---- with a critic ---------------------------------------------------------------------------------------------------

BEHIND_GATES = {0.95: (0.9999, 0.9886), 0.0: (0.9482, 0.8133)}
"""With closing gates and an exact critic, by lam: cosine to the gradient of the gated return, and relative length."""


def by_critic(lam: float, of: Return = return_to_go, **more: object) -> Advantages:
    """GAE with an exact critic for the return `of`, before whitening.

    Whitening subtracts a mean over the batch, in which each trajectory counts once, whatever its probability. It
    therefore has no meaningful expectation here.
    """

    def advantages(groups: Sequence[Group]) -> Sequence[float]:
        columns = batch(groups)
        values_T = np.array([true_value(POLICY, state, of) for state in columns.prompts])
        a = assign(columns, options(adv_estimator="gae", lam=lam, **more), values_T=values_T)
        advantage_T = a.returns_T - values_T
        whitened_T = a.token_advantages()
        assert np.corrcoef(advantage_T, whitened_T)[0, 1] == pytest.approx(1.0, abs=1e-12)
        return advantage_T.tolist()

    return advantages


@pytest.mark.parametrize("lam", [1.0, 0.95, 0.0])
def test_gae_with_an_exact_critic_equals_the_gradient_of_j(lam):
    assert expected_gradient(POLICY, 2, by_critic(lam)) == exactly(gradient(POLICY))


@pytest.mark.parametrize("critic", [gated_return, return_to_go, lambda path, position: 0.0])
def test_gae_at_lam_1_is_exact_for_any_critic(critic):
    assert expected_gradient(POLICY, 2, by_critic(1.0, critic, **GATED)) == exactly(gradient(POLICY, gated_return))


@pytest.mark.parametrize("lam", BEHIND_GATES)
def test_gae_below_lam_1_misses_the_covariance_of_gates(lam):
    def covariance(state: str) -> float:
        """The covariance of gate and return, above 0 if the gate passes returns above the state's mean."""
        behind = [(path, 1) for path in paths(POLICY) if len(path) > 1 and path[1][0] == state]
        p = [probability(POLICY, path[1]) for path, _ in behind]
        opens = [REWARD[path[1]] > 0.5 for path, _ in behind]
        worth = [gated_return(*at) for at in behind]
        mean = sum(map(np.multiply, p, worth))
        return sum(q * is_open * (x - mean) for q, is_open, x in zip(p, opens, worth, strict=True))

    def short_of_it(path: Path, position: int) -> float:
        passed = len(path) > 1 and position == 0
        return gated_return(path, position) - (passed and (1 - lam) * covariance(path[1][0]))

    found, gated = expected_gradient(POLICY, 2, by_critic(lam, gated_return, **GATED)), gradient(POLICY, gated_return)
    assert found == exactly(gradient(POLICY, short_of_it))
    assert (cosine(found, gated), length(found, gated)) == pytest.approx(BEHIND_GATES[lam], abs=5e-4)
