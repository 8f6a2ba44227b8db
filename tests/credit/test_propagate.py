"""Propagation rules: numbers by hand, a long trajectory, and the registry."""

from dataclasses import dataclass

import numpy as np
import pytest

from creditflow.credit import Credit, Rule, RuleInput, assign, propagation_rule
from creditflow.credit.records import PROPAGATION_RULES, compared_rules
from creditflow.data import Score, TrajectoryBatch
from creditflow.errors import ConfigError
from tests.builders import credit_options, credited, make_trajectory, step
from tests.credit.strategies import registered


def credit(trajectory, **chosen):
    return credited(trajectory, **chosen).credit.total_S.tolist()


CHAIN = make_trajectory("t", [step("plan", 0.75), step("write", 0.25), step("verify", 1.0)], 1.0)


@pytest.mark.parametrize(
    ("rule", "outcome_to", "origin", "expected"),
    [
        ("identical", "all", 1.0, [1.0, 1.0, 1.0]),
        ("uniform", "all", 1.0, [1 / 3, 1 / 3, 1 / 3]),
        ("own", "all", 1.0, [0.75, 0.25, 1.0]),
        ("own", "answer", 0.0, [0.75, 0.25, 2.0]),
        # gamma 1/2: verify -> 0; write -> -3/4; plan -> -1/4 + (-3/4)/2; plus 1 for all.
        ("discounted", "all", 1.0, [0.375, 0.25, 1.0]),
        # verify -> 1 + 1; write -> 1/4 + 2/2; plan -> 3/4 + (5/4)/2.
        ("discounted", "answer", 0.0, [1.375, 1.25, 2.0]),
        # write is below 1/2: its parents receive nothing; it still receives credit from verify.
        ("threshold", "all", 1.0, [0.75, 0.25, 1.0]),
        ("threshold", "answer", 0.0, [0.75, 1.25, 2.0]),
    ],
)
def test_credit_of_a_chain_by_hand(rule, outcome_to, origin, expected):
    got = credit(CHAIN, propagation=rule, outcome_to=outcome_to, sub_reward_origin=origin, gamma=0.5)
    assert got == pytest.approx(expected, rel=1e-15)


def test_trajectory_of_seventy_thousand_steps():
    n = 70_000
    long = TrajectoryBatch.from_arrays(
        trajectory_of_step=np.zeros(n, dtype=np.int64),
        group_of_trajectory=np.zeros(1, dtype=np.int64),
        outcome=np.ones(1),
        scores=np.ones((n, 1)),
    )
    a = assign(long, credit_options(propagation="threshold", gamma=1.0, sub_reward_origin=0.0, group_by="task"))
    assert a.credit.total_S[0] == 70_001.0


def test_custom_rule_is_registered_by_name():
    @propagation_rule("last_only")
    @dataclass(frozen=True)
    class LastOnly(Rule):
        def credit(self, inputs: RuleInput) -> Credit:
            zero_S = np.zeros(inputs.batch.n_steps)
            shared_S = np.where(inputs.batch.is_answer, inputs.rewards.outcome_S, 0.0)
            return Credit(zero_S, zero_S, shared_S, inputs.batch.is_answer.astype(np.uint8))

    with registered(PROPAGATION_RULES, "last_only"):
        trajectory = make_trajectory("t", [step("a", Score(0.0, status="failed")), step("b")], 1.0, answer_steps=(1,))
        assert credit(trajectory, propagation="last_only") == [0.0, 1.0]
        with pytest.raises(ConfigError, match=r"algorithm\.propagation: expected a new name, got 'last_only'"):
            propagation_rule("last_only")(LastOnly)


def test_unknown_rule_error_lists_the_known_ones():
    names = (
        "calibrated, decoupled, discounted, gagpo, gigpo, identical, irc, mt_grpo, own, posterior, threshold, uniform"
    )
    with pytest.raises(ConfigError, match=f"expected one of {names}, or FILE.py:NAME, got 'x'"):
        PROPAGATION_RULES["x"]


def test_compared_rules_begin_with_the_baseline():
    assert compared_rules() == ("identical", "own", "discounted", "threshold", "posterior")
