"""Published rules and presets against their formulas (`tests/oracle/published.py`), and their explanations."""

import random

import numpy as np
import pytest

from creditflow.config.presets import PRESETS
from creditflow.credit import assign, explain
from creditflow.data import Score
from tests.builders import batch_of, credit_options, make_trajectory, step
from tests.oracle import published

RULES = ("gagpo", "gigpo", "irc", "mt_grpo")
NEUTRAL = {"gagpo": {"value_prior": 0.0}}
"""Changes of a preset's options that give the published formula."""
CHAIN = ("planner", "executor", "executor", "verifier")


def options(preset, **changes):
    """The credit options of a preset, with neutral origin and weights."""
    of_credit = {key: value for key, value in PRESETS[preset].options.items() if key.startswith("algorithm.")}
    chosen = {key.removeprefix("algorithm."): value for key, value in of_credit.items()}
    spec = chosen.pop("propagation")
    spec = {"rule": spec} if isinstance(spec, str) else dict(spec)
    return credit_options(spec.pop("rule"), **({"sub_reward_origin": 0.0} | chosen | spec | changes))


GRAPHS = {"chain": None, "diamond": [(), (0,), (0,), (1, 2)]}
"""Parents of the four steps of CHAIN; None: the step before."""


def chains(seed=0, rollouts=4, tasks=2, agents=CHAIN, parents=None):
    """Chains of steps with graded scores and outcomes; some states occur in several trajectories."""
    rng = random.Random(seed)
    return [
        make_trajectory(
            f"{task}.{n}",
            [
                step(
                    agent,
                    rng.randrange(9) / 8,
                    parents and parents[i],
                    prompt=f"{agent} {rng.randrange(2)}",
                    tokens=i + 1,
                )
                for i, agent in enumerate(agents)
            ],
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
        for s in trajectory.steps:
            children = [k for k in trajectory.steps if s.index in k.parents]
            steps.append(
                {
                    "trajectory": n,
                    "task": trajectory.uid,
                    "agent": s.agent,
                    "turn": s.turn,
                    "state": s.prompt,
                    "reward": s.scores["f"].value,
                    "children": [first + k.index for k in children],
                    "shares": [1 / len(k.parents) for k in children],
                    "tokens": sum(s.response_mask),
                }
            )
        first += len(trajectory.steps)
    return steps, [trajectory.outcome.value for trajectory in trajectories]


def near(assigned, expected):
    np.testing.assert_allclose(assigned.advantage.advantage_S, expected, rtol=0, atol=1e-12)


def explained(assigned):
    """Check that every explanation gives the advantage, bit for bit."""
    for s in range(assigned.batch.n_steps):
        assert explain(assigned, s).replay() == assigned.advantage.advantage_S[s]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["magrpo", "dr_mas", "at_grpo"])
def test_presets_of_options_equal_their_formulas(name, seed):
    # The formula of Dr. MAS gives each step the same weight, creditflow each trajectory: equal for one step per agent.
    trajectories = chains(seed, agents=("planner", "executor", "verifier") if name == "dr_mas" else CHAIN)
    assigned = assign(batch_of(*trajectories), options(name))
    near(assigned, getattr(published, name)(*rows(trajectories)))
    explained(assigned)


@pytest.mark.parametrize("seed", range(3))
def test_mappo_equals_gae_with_the_outcome_at_the_end(seed):
    trajectories = chains(seed)
    for trajectory in trajectories:
        for s in trajectory.steps:
            s.response_ids, s.response_mask, s.logprobs, s.ref_logprobs = (7,), (1,), (-1.0,), ()
    drawn = np.random.default_rng(seed)
    values = drawn.normal(size=(len(trajectories), len(CHAIN)))
    assigned = assign(batch_of(*trajectories), options("mappo"), values_T=values.ravel())
    near(
        assigned,
        published.mappo(values.tolist(), [trajectory.outcome.value for trajectory in trajectories], 0.99, 0.95),
    )
    explained(assigned)


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", RULES)
def test_rules_equal_their_formulas(name, seed, graph):
    trajectories = chains(seed, parents=GRAPHS[graph])
    assigned = assign(batch_of(*trajectories), options(name, **NEUTRAL.get(name, {})))
    near(assigned, getattr(published, name)(*rows(trajectories)))
    explained(assigned)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("gigpo", {"step_weight": 0.5}, {"weight": 0.5}),
        ("mt_grpo", {"episode_weight": 0.5}, {"weight": 0.5}),
        ("at_grpo", {"w_o": 0.5}, {"alpha": 0.5}),
        *(("gagpo", {"value_prior": k, "lam": 0.5}, {"prior": k, "lam": 0.5}) for k in (0.5, 1.0, 3.0)),
    ],
)
def test_options_of_rules_weigh_their_parts(name, changes, expected):
    trajectories = chains()
    assigned = assign(batch_of(*trajectories), options(name, **changes))
    near(assigned, getattr(published, name)(*rows(trajectories), **expected))


@pytest.mark.parametrize("seed", range(3))
def test_decoupled_gives_scores_the_spread_of_outcomes(seed):
    agents = ("planner", "executor", "verifier")  # each acts once: steps and trajectories weigh the same
    trajectories, by_agent = chains(seed, agents=agents), {"group_by": "agent"}
    assigned = assign(batch_of(*trajectories), credit_options("decoupled", w_r=2.0, **by_agent))
    near(assigned, published.decoupled(*rows(trajectories), 2.0))
    explained(assigned)


def test_decoupled_learns_from_what_a_step_has():
    scores, outcomes = (0.0, 1.0, None, "failed", 1.0), (0.0, 1.0, 1.0, 0.0, None)
    pairs = enumerate(zip(scores, outcomes, strict=True))
    made = [make_trajectory(f"{n}", [step("solver", score)], outcome) for n, (score, outcome) in pairs]
    advantage_S = assign(batch_of(*made), credit_options("decoupled", group_by="agent")).advantage.advantage_S
    assert np.isfinite(advantage_S).all()
    assert advantage_S[0] < 0 < advantage_S[1]
    assert advantage_S[3] == 0.0  # its score failed


def test_gagpo_needs_a_prior_where_no_state_occurs_twice():
    trajectories = [
        make_trajectory(f"{n}", [step("solver", prompt=f"state {n} {k}") for k in range(2)], outcome=float(n % 2))
        for n in range(4)
    ]
    assert not assign(batch_of(*trajectories), options("gagpo", value_prior=0.0, gamma=1.0)).advantage.advantage_S.any()
    assert assign(batch_of(*trajectories), options("gagpo", gamma=1.0)).advantage.advantage_S.all()


def test_irc_gives_no_weight_to_scores_without_correlation():
    scores, outcome = [0.0, 1.0, 0.0, 1.0], [0.0, 0.0, 1.0, 1.0]
    scored, unscored = (
        [make_trajectory(f"{n}", [step("solver", score)], outcome=outcome[n]) for n, score in enumerate(values)]
        for values in (scores, [None] * 4)
    )
    first, second = (assign(batch_of(*trajectories), options("irc")) for trajectories in (scored, unscored))
    near(first, second.advantage.advantage_S)


def test_step_alone_at_its_state_has_the_part_of_its_episode():
    trajectories = [
        make_trajectory(f"{n}", [step("solver", 0.5, prompt=f"state {n}")], outcome=float(n)) for n in range(3)
    ]
    advantage_S = assign(batch_of(*trajectories), options("gigpo")).advantage.advantage_S
    np.testing.assert_allclose(advantage_S, [-1 / (1 + 1e-6), 0.0, 1 / (1 + 1e-6)], atol=1e-12)


def test_rules_compare_the_turns_of_a_task():
    """Each turn has the same credit in every trajectory, so that groups by turn would be tied."""
    twice = [step("solver", 1.0, prompt="state"), step("solver", 1.0, prompt="state")]
    assigned = assign(batch_of(*(make_trajectory(f"{n}", twice, 1.0) for n in range(2))), options("gigpo"))
    assert (assigned.advantage.advantage_S[::2] > 0).all()
    assert (assigned.advantage.advantage_S[1::2] < 0).all()


def test_steps_upstream_of_a_lost_outcome_are_not_trained():
    steps = [step("planner", 0.5), step("executor", 0.5)]
    lost = {"executor": Score(0.0, status="failed")}
    trajectories = [
        make_trajectory("a", steps, outcome=1.0, outcomes=lost),
        *(make_trajectory(str(n), steps, outcome=float(n)) for n in range(2)),
    ]
    assert assign(batch_of(*trajectories), options("gigpo")).groups.trained_S.tolist() == [False] * 2 + [True] * 4
