"""Outcomes of single agents, for teams that compete: each agent's steps use its own, else the common one."""

from dataclasses import replace

import numpy as np
import pytest

from creditflow.credit import assign, check_groups, explain
from creditflow.credit.analysis.metrics import credit_metrics
from creditflow.credit.rewards import read_rewards
from creditflow.data import Score, TrajectoryBatch
from creditflow.errors import BatchError
from tests.builders import batch_of, credit_options, credited, make_trajectory, step
from tests.oracle.credit_oracle import credit_rows


def game(id, white, black, common=0.5, scores=(0.25, 1.0, 0.5, 0.75), **more):
    """Two moves of each player; a move uses the player's move before it. Both last moves are the answer."""
    players, parents = ("white", "black") * 2, ((), (), (0,), (1,))
    steps = [step(player, r, above) for player, r, above in zip(players, scores, parents, strict=True)]
    return make_trajectory(id, steps, common, answer_steps=(2, 3), outcomes={"white": white, "black": black}, **more)


GAMES = (game("t0", 1.0, 0.0), game("t1", 0.0, 1.0, scores=(0.5, 0.5, 1.0, 0.0)), game("t2", 0.25, 0.75))


@pytest.mark.parametrize(
    ("keys", "paid"),
    [
        ({"propagation": "identical"}, [1.0, 0.0, 1.0, 0.0]),
        ({"propagation": "uniform"}, [0.25, 0.0, 0.25, 0.0]),
        ({"propagation": "own", "w_o": 2.0}, [2.0, 0.0, 2.0, 0.0]),
        ({"propagation": "own", "outcome_to": "answer"}, [0.0, 0.0, 0.5, 0.0]),
        ({"propagation": "discounted", "outcome_to": "answer"}, [0.25, 0.0, 0.5, 0.0]),
        ({"propagation": "threshold", "outcome_to": "answer", "propagation_threshold": 0.6}, [0.0, 0.0, 0.5, 0.0]),
    ],
)
def test_players_of_a_game_get_opposite_outcomes(keys, paid):
    """White wins and black loses; the common outcome of 0.5 reaches neither."""
    chosen = credit_options(**{"propagation": "threshold", "w_r": 0.0, "gamma": 0.5, **keys})
    assert assign(batch_of(*GAMES), chosen).credit.total_S[:4].tolist() == paid
    assert [row.credit for row in credit_rows(GAMES, chosen)][:4] == paid


def test_outcome_keeps_its_units():
    outcomes = (Score(7.0, (-10.0, 10.0)), -2.0)
    assigned = credited(*(make_trajectory(f"t{n}", [step()], outcome) for n, outcome in enumerate(outcomes)))
    assert assigned.credit.total_S.tolist() == [7.0, -2.0]


def test_failed_outcome_masks_the_steps_of_its_agent_alone():
    failed = game("t0", "failed", 1.0)
    assigned = credited(failed, *GAMES[1:], propagation="identical", group_by="task_agent")
    assert assigned.groups.trained_S.tolist() == [False, True, False, True] + [True] * 8
    assert assigned.rewards.masked_S.tolist() == [True, False, True, False] + [False] * 8
    assert not assigned.rewards.masked_N.any()
    assert assigned.groups.group_size_S[:4].tolist() == [0, 3, 0, 3]
    note = explain(assigned, 0).operations[-1].note
    assert note == "it is masked: the outcome of white could not be scored"


def test_failed_outcomes_of_all_agents_mask_the_trajectory():
    assigned = credited(game("t0", "failed", "timeout"), *GAMES[1:])
    assert assigned.rewards.masked_N.tolist() == [True, False, False]
    assert [finding.code for finding in check_groups(assigned.batch)].count("masked_trajectories") == 1


def test_failed_or_truncated_trajectory_is_masked_whole():
    failed, truncated = game("t0", 1.0, 0.0, status="failed"), game("t1", 1.0, 0.0, status="truncated")
    rewards = read_rewards(batch_of(failed, truncated, *GAMES[2:]), credit_options(mask_truncated=True))
    assert rewards.masked_S.tolist() == [True] * 8 + [False] * 4
    assert rewards.masked_N.tolist() == [True, True, False]
    kept = read_rewards(batch_of(truncated), credit_options())
    assert (kept.outcome_S.tolist(), kept.known_S.all()) == ([1.0, 0.0, 1.0, 0.0], True)


@pytest.mark.parametrize(
    ("outcomes", "message"),
    [
        ({"white": Score(float("nan"))}, r"\['white'\]: expected a finite outcome where its scoring was ok, got nan"),
        ({"white": Score(float("inf"))}, r"\['white'\]: expected a finite outcome where its scoring was ok, got inf"),
        ({"white": Score("1")}, r"outcomes\['white'\]: expected a number"),
        ({"white": Score((0.0, 1.0))}, "expected one number as outcome"),
        ({"white": 1.0}, "expected a Score, got float 1.0"),
        ({1: Score(1.0)}, "expected texts as names, got int 1"),
        (None, "expected a dict of Score by name, got NoneType None"),
    ],
)
def test_wrong_outcome_of_an_agent_is_refused(outcomes, message):
    batch = batch_of(game("t0", 1.0, 0.0))
    with pytest.raises(BatchError, match=message):
        assign(replace(batch, outcomes_of_agents=(outcomes,)), credit_options(propagation="threshold"))


def test_failed_outcome_of_the_answer_trains_no_step_before_it():
    """The answer of a passes on no outcome; 0 would be a reward."""
    steps = [step("b"), step("a", parents=(0,))]
    failed = make_trajectory("t0", steps, 1.0, outcomes={"a": "failed"})
    rest = [make_trajectory(f"t{n}", steps, float(n > 1)) for n in (1, 2)]
    for outcome_to, trained in (("answer", False), ("all", True)):
        assigned = credited(failed, *rest, outcome_to=outcome_to, propagation="discounted")
        assert assigned.groups.trained_S.tolist() == [trained, False] + [True] * 4
    note = explain(credited(failed, *rest, outcome_to="answer"), 0).operations[-1].note
    assert note == "the outcome of a later answer step's agent could not be scored"
    relative = credited(failed, *rest, propagation="gigpo", adv_estimator="relative")
    assert relative.credit.frozen_S is None
    assert explain(relative, 0).operations[-1].note == note
    codes = [finding.code for finding in check_groups(batch_of(failed, *rest))]
    assert "masked_agents" in codes


def test_outcome_is_found_in_a_batch_of_many_trajectories():
    n = 20_000
    batch = TrajectoryBatch.from_arrays(
        trajectory_of_step=np.arange(n), group_of_trajectory=np.zeros(n, dtype=np.int64), outcome=np.ones(n)
    )
    own = tuple({"agent_0": Score(0.25)} if i == 19_000 else {} for i in range(n))
    narrow = {"trajectory_of_step": np.arange(n, dtype=np.int16), "agent_of_step": np.zeros(n, dtype=np.int8)}
    batch = replace(batch, agent_names=("agent_0", "other"), outcomes_of_agents=own, **narrow)
    assigned = assign(batch, credit_options(propagation="identical"))
    assert assigned.credit.total_S[19_000] == 0.25
    assert credit_metrics(assigned)["credit/mean/agent_0"] == pytest.approx(1 - 0.75 / n)


def test_explanation_names_the_agent_of_the_outcome():
    assigned = credited(*GAMES, propagation="own")
    outcome = next(operation for operation in explain(assigned, 1).operations if operation.name == "outcome")
    assert (outcome.value, outcome.note) == (0.0, "of black")
    shared = explain(credited(*GAMES, propagation="identical"), 1).operations
    assert "of black" in [operation.note for operation in shared if operation.name == "outcome"]
    common = credited(*(make_trajectory(f"t{n}", [step("a")], float(n)) for n in range(2)), propagation="own")
    assert next(operation for operation in explain(common, 0).operations if operation.name == "outcome").note == ""


def test_outcome_that_flows_to_an_opponent_is_reported():
    steps = [step("pro", 1.0), step("con", 1.0)]
    debates = [make_trajectory(f"t{n}", steps, 0.5, outcomes={"pro": n, "con": 1 - n}) for n in range(2)]
    batch = batch_of(*debates)
    to_answer = credit_options(propagation="threshold", outcome_to="answer")
    messages = {finding.code: finding.message for finding in check_groups(batch, to_answer)}
    assert "the outcome of con flows to pro, whose outcome differs" in messages["outcome_of_another"]
    others = [*check_groups(batch), *check_groups(batch_of(*GAMES), to_answer)]
    assert "outcome_of_another" not in {finding.code for finding in others}
