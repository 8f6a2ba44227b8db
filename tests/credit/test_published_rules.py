"""Published rules and presets against their formulas (`tests/oracle/published.py`), and their explanations."""

import random

import numpy as np
import pytest

from creditflow.credit import CreditOptions, assign, explain
from creditflow.credit.presets import PRESETS
from creditflow.data import Score
from tests.builders import batch_of, make_trajectory, step
from tests.oracle import published

CHAIN = ("planner", "executor", "executor", "verifier")


def options(preset, **changes):
    """The credit options of a preset, with neutral origin and weights."""
    chosen = {key.removeprefix("algorithm."): value for key, value in PRESETS[preset].options.items()}
    return CreditOptions(**({"sub_reward_origin": 0.0} | chosen | changes))


def chains(seed=0, rollouts=4, tasks=2, agents=CHAIN):
    """Chains of steps with graded scores and outcomes; some states occur in several trajectories."""
    rng = random.Random(seed)
    return [
        make_trajectory(
            f"{task}.{n}",
            [step(agent, rng.randrange(9) / 8, prompt=f"{agent} {rng.randrange(2)}", tokens=2) for agent in agents],
            outcome=rng.randrange(9) / 8,
            task=f"q{task}",
        )
        for task in range(tasks)
        for n in range(rollouts)
    ]


def rows(trajectories):
    """The steps and outcomes of the oracle."""
    steps, first = [], 0
    for n, trajectory in enumerate(trajectories):
        for one in trajectory.steps:
            children = [k for k in trajectory.steps if one.index in k.parents]
            steps.append(
                {
                    "trajectory": n,
                    "task": trajectory.uid,
                    "agent": one.agent,
                    "turn": one.turn,
                    "state": one.prompt,
                    "reward": one.scores["f"].value,
                    "children": [first + k.index for k in children],
                    "shares": [1 / len(k.parents) for k in children],
                    "tokens": sum(one.response_mask),
                }
            )
        first += len(trajectory.steps)
    return steps, [trajectory.outcome.value for trajectory in trajectories]


def near(assigned, expected):
    np.testing.assert_allclose(assigned.advantage_S, expected, rtol=0, atol=1e-12)


def explained(assigned):
    """Check that every explanation gives the advantage, bit for bit."""
    for s in range(assigned.batch.n_steps):
        assert explain(assigned, s).replay() == assigned.advantage_S[s]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["magrpo", "dr_mas", "at_grpo"])
def test_presets_of_options_equal_their_formulas(name, seed):
    # The formula of Dr. MAS gives each step the same weight, creditflow each trajectory: equal for one step per agent.
    trajectories = chains(seed, agents=("planner", "executor", "verifier") if name == "dr_mas" else CHAIN)
    assigned = assign(batch_of(*trajectories), options(name))
    near(assigned, getattr(published, name)(*rows(trajectories)))
    explained(assigned)


def test_at_grpo_weighs_the_team_reward_by_w_o():
    trajectories = chains()
    near(
        assign(batch_of(*trajectories), options("at_grpo", w_o=0.5)), published.at_grpo(*rows(trajectories), alpha=0.5)
    )


def test_prime_equals_its_formula():
    tokens = [(0.1, 0.9, 0.4), (0.8, 0.2), (0.5, 0.6, 0.7, 0.3)]
    outcome = [1.0, 0.25, 0.0]
    trajectories = [
        make_trajectory(f"{n}", [step("solver", {"f": Score(values)}, tokens=len(values))], outcome=outcome[n])
        for n, values in enumerate(tokens)
    ]
    assigned = assign(batch_of(*trajectories), options("prime"))
    expected = [value for values in published.prime(tokens, outcome) for value in values]
    np.testing.assert_allclose(assigned.token_advantages(), expected, rtol=0, atol=1e-12)
