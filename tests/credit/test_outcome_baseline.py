"""The prefix baseline: its numbers, its independence from the step, and the unbiased gradient."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditflow.credit import CreditOptions, assign, explain, prefix_features
from creditflow.credit.history import DECAY, History
from creditflow.credit.outcome_baseline import FEATURES, FOLDS, PART, ridge
from creditflow.credit.records import PREFIX_FEATURES
from creditflow.data import Trajectory, TrajectoryBatch
from creditflow.errors import ConfigError
from creditflow.runs.step_files import read_step_file, write_step_file
from tests.builders import batch_of, examples, make_trajectory, step
from tests.credit.strategies import situations
from tests.credit.test_gradient import (
    POLICY,
    REWARD,
    Choice,
    Group,
    Path,
    exactly,
    expected_gradient,
    gradient,
    outcome,
    paths,
)
from tests.oracle import fitted as oracle

PREFIX = CreditOptions(propagation="none", outcome_baseline="prefix", adv_estimator="rloo", group_by="task_agent_turn")


def chains(tasks: int, n: int, seed: int, length: int = 4) -> list:
    """Chains of a planner and executors; the outcome falls with the number of wrong steps."""
    drawn = random.Random(seed)
    made = []
    for task in range(tasks):
        for i in range(n):
            rewards = [drawn.choice((0.0, 0.5, 1.0, 1.0)) for _ in range(length)]
            steps = [step("planner" if t == 0 else "executor", r) for t, r in enumerate(rewards)]
            passed = float(drawn.random() < 0.9 ** (task % 3) * 0.4 ** rewards.count(0.0))
            made.append(make_trajectory(f"{task}-{i}", steps, passed, task=f"q{task}"))
    return made


def expected_by_oracle(trajectories, earlier_rows=()) -> list[float]:
    """The prefix baselines, from lists."""
    tasks = sorted({one.uid for one in trajectories}, key=[one.uid for one in trajectories].index)
    rows = []  # (agent, fold, weight, features, target)
    for one in trajectories:
        others = [other.outcome.value for other in trajectories if other.uid == one.uid and other is not one]
        mean = sum(others) / len(others)
        agents = [s.agent for s in one.steps]
        turns = [agents[:i].count(agent) for i, agent in enumerate(agents)]
        rewards = [s.scores["f"].value if s.scores else None for s in one.steps]
        for i, agent in enumerate(agents):
            x = oracle.features([s.parents for s in one.steps], rewards, turns, i)
            rows.append((agent, tasks.index(one.uid) % FOLDS, 1 / agents.count(agent), x, one.outcome.value - mean))
    made = []
    for agent, fold, _, x, _ in rows:
        used = [row for row in rows if row[0] == agent and row[1] != fold]
        used += [row for row in earlier_rows if row[0] == agent]
        coefficients = oracle.ridge([r[3] for r in used], [r[4] for r in used], [r[2] for r in used])
        made.append(float(coefficients @ [1.0, *x]))
    return made


@pytest.mark.parametrize(("tasks", "n"), [(6, 8), (16, 4), (2, 3)])
def test_prefix_baseline_equals_an_explicit_ridge_regression(tasks: int, n: int):
    trajectories = chains(tasks, n, seed=tasks)
    found = assign(batch_of(*trajectories), PREFIX).prefix_S
    assert found == pytest.approx(np.array(expected_by_oracle(trajectories)), abs=1e-9)


def test_prefix_baseline_explains_the_outcome_of_later_steps():
    assigned = assign(batch_of(*chains(64, 8, seed=1)), PREFIX)
    last_S = assigned.batch.index_of_step == 3
    passed_S = assigned.batch.outcome[assigned.batch.trajectory_of_step]
    mean_N = assigned.batch.outcome.reshape(64, 8).mean(axis=1, keepdims=True).repeat(8, axis=1).ravel()
    before_S = (passed_S - mean_N[assigned.batch.trajectory_of_step])[last_S]
    assert ((before_S - assigned.prefix_S[last_S]) ** 2).mean() < 0.85 * (before_S**2).mean()


def test_prefix_baseline_without_other_groups_is_0():
    assert not assign(batch_of(*chains(1, 8, seed=2)), PREFIX).prefix_S.any()


# ---- earlier batches -------------------------------------------------------------------------------------------------


def test_history_fades_and_reaches_the_next_fit():
    first, second = (batch_of(*chains(4, 8, seed=seed)) for seed in (3, 4))
    after = assign(first, PREFIX).history_after
    alone = assign(second, PREFIX)
    both = assign(second, PREFIX, history=after)
    assert not np.array_equal(alone.prefix_S, both.prefix_S)
    for agent in ("planner", "executor"):
        whole = DECAY * after.sums(PART)[agent] + alone.history_after.sums(PART)[agent]
        assert both.history_after.sums(PART)[agent] == pytest.approx(whole, rel=1e-12)


def test_history_survives_json_bit_for_bit():
    after = assign(batch_of(*chains(4, 8, seed=5)), replace(PREFIX, score_weight="calibrated")).history_after
    restored = History.from_json(after.to_json())
    assert restored.to_json() == after.to_json()
    batch = batch_of(*chains(4, 8, seed=6))
    found, again = (assign(batch, PREFIX, history=one).prefix_S for one in (after, restored))
    assert (found == again).all()


def test_history_of_other_features_is_not_read():
    first, second = (batch_of(*chains(4, 8, seed=seed)) for seed in (3, 4))
    for name in ("x", "y"):
        prefix_features(name)(lambda batch, name=name: {name: np.arange(batch.n_steps) % 3.0})
    try:
        after = assign(first, replace(PREFIX, prefix_features="x")).history_after
        alone, informed = (
            assign(second, replace(PREFIX, prefix_features="y"), history=one).prefix_S for one in (None, after)
        )
    finally:
        for name in ("x", "y"):
            PREFIX_FEATURES.remove(name)
    assert (alone == informed).all()


def test_only_rollout_of_a_task_does_not_leak_into_other_groups():
    def made(outcome: float) -> np.ndarray:
        trajectories = chains(1, 8, seed=12)
        trajectories[0].outcome = replace(trajectories[0].outcome, value=outcome)
        singles = [make_trajectory(f"s{i}", [step("planner", 1.0)], float(i % 2), task=f"s{i}") for i in range(15)]
        return assign(batch_of(*trajectories, *singles), PREFIX).prefix_S[:4]

    assert (made(0.0) == made(1.0)).all()


def test_sums_that_overflow_leave_the_history_as_it_was():
    after = assign(batch_of(*chains(4, 8, seed=3)), PREFIX).history_after
    before = after.sums(PART)["planner"]
    later = after.after({PART: {"planner": np.full_like(before, np.inf)}}, None)
    assert later.sums(PART)["planner"] == pytest.approx(DECAY * before)
    assert not ridge(np.full((3, 3), np.inf)).any()


def test_history_of_an_agent_that_left_fades():
    after = assign(batch_of(*chains(4, 8, seed=7)), PREFIX).history_after
    alone = batch_of(*(make_trajectory(f"t{i}", [step("solver", 1.0)], float(i % 2)) for i in range(4)))
    later = assign(alone, PREFIX, history=after).history_after
    assert set(later.sums(PART)) == {"planner", "executor", "solver"}
    assert later.sums(PART)["planner"] == pytest.approx(DECAY * after.sums(PART)["planner"])


# ---- unbiased --------------------------------------------------------------------------------------------------------


Verdict = Callable[[object, Choice], float]
VERDICTS: dict[str, Verdict] = {
    "random": lambda key, choice: random.Random(repr((key, choice))).choice((0.0, 0.5, 1.0)),
    "informative": lambda key, choice: REWARD[choice],
}
# Outcomes that depend on the first verdict alone, so that the regression is in force.
RELATED = [(first, first > 0.5) for first in (0.3, 0.7) for _ in range(32)]


def with_other_tasks(group: Group, verdict: Verdict) -> TrajectoryBatch:
    """A batch of one group, and 32 trajectories of other tasks under the same agent."""
    drawn = random.Random(0)
    made = [("own", i, path) for i, path in enumerate(group)]
    made += [(f"q{task}", i, drawn.choice(paths(POLICY))) for task in range(8) for i in range(4)]
    return batch_of(*(trajectory_of(task, i, path, verdict) for task, i, path in made))


def trajectory_of(task: str, i: int, path: Path, verdict: Verdict) -> Trajectory:
    steps = [step("solver", verdict((task, t), choice), prompt=choice[0], tokens=1) for t, choice in enumerate(path)]
    return make_trajectory(f"{task}-{i}", steps, outcome(path), task=task)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("verdicts", VERDICTS)
def test_prefix_baseline_leaves_the_gradient_unbiased(n: int, verdicts: str):
    chosen = replace(PREFIX, w_r=0.0)
    verdict = VERDICTS[verdicts]
    related = [
        make_trajectory(f"{i}", [step("solver", first), step("solver", 0.5)], float(passed), task=f"q{i % 8}")
        for i, (first, passed) in enumerate(RELATED)
    ]
    history = assign(batch_of(*related), chosen).history_after
    largest = 0.0

    def advantages(groups: Sequence[Group]) -> Sequence[float]:
        nonlocal largest
        found: list[float] = []
        for group in groups:
            assigned = assign(with_other_tasks(group, verdict), chosen, history=history)
            own = sum(map(len, group))
            found += assigned.advantage_S[:own].tolist()
            largest = max(largest, np.abs(assigned.prefix_S[:own]).max())
        return found

    found = expected_gradient(POLICY, n, advantages)
    true = gradient(POLICY, lambda path, _: outcome(path))
    assert found == exactly(true)
    assert np.linalg.norm(true) > 0.01
    assert largest > 0.1


@examples(50)
@given(
    situations(outcome_baseline="prefix", outcome_to="all", adv_estimator="rloo", decomp_granularity="step"),
    st.randoms(use_true_random=False),
)
def test_prefix_baseline_ignores_the_step_and_what_follows(situation, drawn):
    trajectories, chosen, _ = situation
    before = assign(batch_of(*trajectories), chosen)
    at = drawn.randrange(before.batch.n_steps)
    one = trajectories[before.batch.trajectory_of_step[at]]
    for later in one.steps[before.batch.index_of_step[at] :]:
        later.scores = {name: replace(s, value=s.range[drawn.randrange(2)]) for name, s in later.scores.items()}
    if one.outcome is not None and one.outcome.status == "ok" and not one.outcomes:
        one.outcome = replace(one.outcome, value=one.outcome.range[drawn.randrange(2)])
    after = assign(batch_of(*trajectories), chosen)
    assert after.prefix_S[at] == before.prefix_S[at]


# ---- further features ------------------------------------------------------------------------------------------------


@pytest.fixture
def difficulty():
    """A registered feature: the outcome that the task's number allows."""
    prefix_features("difficulty")(
        lambda batch: {"difficulty": (batch.group_of_trajectory[batch.trajectory_of_step] % 3).astype(float)}
    )
    yield "difficulty"
    PREFIX_FEATURES.remove("difficulty")


def test_users_feature_enters_the_prediction(difficulty: str, tmp_path):
    batch = batch_of(*chains(16, 8, seed=9))
    chosen = replace(PREFIX, prefix_features=difficulty)
    assigned = assign(batch, chosen)
    assert assigned.fitted["baseline"]["features"] == [*FEATURES, "difficulty"]
    assert not np.array_equal(assigned.prefix_S, assign(batch, PREFIX).prefix_S)
    write_step_file(tmp_path / "000001.parquet", 1, batch, assigned)
    read = read_step_file(tmp_path / "000001.parquet").assignment
    for s in (0, 3):
        assert explain(read, s) == explain(assigned, s)
        assert "difficulty" in str(explain(read, s))


def test_critics_values_are_a_feature():
    trajectories = chains(8, 8, seed=10)
    for one in trajectories:
        for each in one.steps:
            each.response_ids, each.response_mask, each.logprobs = (7,), (1,), (-1.0,)
    batch = batch_of(*trajectories)
    values_T = np.random.default_rng(0).normal(size=len(batch.response_ids))
    assigned = assign(batch, PREFIX, values_T=values_T)
    assert (assigned.features["critic"] == values_T).all()


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"a": np.zeros(3)}, "a: expected numbers up to 1e"),
        ({"a": np.full(256, np.nan)}, "with 256 other values"),
        ({"a": ["x"] * 256}, "a: expected numbers: could not convert"),
        ({"turn": np.zeros(256)}, "expected a new name, got 'turn', a built-in feature"),
        ([1.0], "expected a mapping from names to arrays"),
    ],
)
def test_wrong_features_are_refused(made: object, message: str):
    prefix_features("wrong")(lambda batch: made)
    try:
        with pytest.raises(ConfigError, match=message):
            assign(batch_of(*chains(8, 8, seed=11)), replace(PREFIX, prefix_features="wrong"))
    finally:
        PREFIX_FEATURES.remove("wrong")


# ---- penalty and options ---------------------------------------------------------------------------------------------


def test_ridge_without_a_relation_gives_0():
    drawn = np.random.default_rng(0)
    rows = np.column_stack([np.ones(40), drawn.normal(size=(40, 3)), np.zeros(40)])
    assert not ridge(rows.T @ rows).any()


def test_ridge_finds_coefficients_of_a_linear_outcome():
    drawn = np.random.default_rng(1)
    x = drawn.normal(size=(5000, 2))
    y = 0.5 + x @ [0.3, -0.7] + 0.1 * drawn.normal(size=5000)
    rows = np.column_stack([np.ones(5000), x, y])
    assert ridge(rows.T @ rows) == pytest.approx([0.5, 0.3, -0.7], abs=0.01)


def test_explain_names_features_and_coefficients():
    assigned = assign(batch_of(*chains(8, 8, seed=8)), PREFIX)
    text = str(explain(assigned, 3))
    assert all(f"coefficient of {name}" in text for name in FEATURES)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"outcome_to": "answer"}, "expected outcome_to all, got answer"),
        ({"adv_estimator": "gae", "propagation": "identical"}, "gae values steps in its own way"),
        ({"decomp_granularity": "agent"}, "an agent's mean contains later ones"),
        ({"propagation": "irc", "adv_estimator": "relative", "group_by": "task"}, "irc compares scores and outcomes"),
        ({"prefix_features": "unknown"}, "prefix_features: expected one of"),
        ({"outcome_baseline": "past"}, "expected group or prefix, got 'past'"),
    ],
)
def test_contradicting_options_are_refused(more: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        replace(PREFIX, **more).validate()
