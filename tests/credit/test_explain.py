"""Replaying the operations of `explain` gives the trained advantage bit for bit."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given

from creditflow.credit import Credit, OutcomeRule, assign, explain
from creditflow.credit.records import (
    ADVANTAGE_ESTIMATORS,
    PROPAGATION_RULES,
    CriticTerms,
    Estimate,
    advantage_estimator,
    propagation_rule,
)
from creditflow.data import Score
from creditflow.errors import BatchError
from tests.builders import batch_of, credit_options, credited, examples, make_trajectory, step
from tests.credit.strategies import LEARNING, registered, situations
from tests.credit.test_against_oracle import CORNERS


def sampled_tokens(batch, s):
    start, stop = batch.token_offsets[s], batch.token_offsets[s + 1]
    return np.flatnonzero(batch.response_mask[start:stop]).tolist()


QUANTILE = {"kind": "quantile", "range": [0.3, 0.9], "target_pass_rate": 0.5, "floor": 0.5}
ALL_CORNERS = {
    **CORNERS,
    "forced open": {"propagation": "threshold", "propagation_threshold": QUANTILE},
    "discounted inside": {"adv_estimator": "reinforce_plus_plus", "gamma_token": 0.5},
    "learned": {"propagation": LEARNING},
    "learned, fixed weight": {"propagation": "calibrated", "score_weight": "fixed", "w_m": 0.5},
    "learned, no harm": {"propagation": "calibrated", "w_m": 0.0},
}


def assert_explained(assigned):
    """Check every step and every sampled token: equal bits, and terms that add up."""
    batch, advantage_T = assigned.batch, assigned.token_advantages()
    for s in range(batch.n_steps):
        story = explain(assigned, s)
        assert story.replay() == story.advantage == assigned.advantage.advantage_S[s]
        assert abs(story.rounding) <= 1e-11 * max([1.0, *(abs(part.value) for part in story.terms)])
        assert all(i < at for at, o in enumerate(story.operations) for i in o.inputs.values())
        for token in sampled_tokens(batch, s):
            assert explain(assigned, s, token).replay() == advantage_T[batch.token_offsets[s] + token]


@pytest.mark.parametrize("corner", ALL_CORNERS)
def test_replay_gives_the_trained_advantage_bit_for_bit(corner):
    @examples(60)
    @given(situations(**ALL_CORNERS[corner]))
    def check(situation):
        trajectories, chosen, values_T = situation
        batch = batch_of(*trajectories)
        assert_explained(assign(batch, chosen, values_T=None if values_T is None else np.array(values_T)))

    check()


def chain(**chosen):
    return credited(
        make_trajectory("t0", [step("plan", 0.75), step("write", {"f": 0.25, "g": 1.0}), step("verify", 1.0)], 1.0),
        make_trajectory("t1", [step("plan", 0.25), step("write", {"f": 1.0, "g": 0.5}), step("verify", 0.0)], 0.0),
        **chosen,
    )


def test_explanation_shows_formulas_scores_gates_and_groups():
    lines = explain(chain(outcome_to="answer"), "t0.0").tree()
    for line in (
        "advantage = weight * ((credit - baseline) / divisor) = 0.707106",
        "│  │  └─ paid = w_r * (sub_reward - sub_reward_origin) = -0.25",
        "│  │     │  └─ score_1 = 0.75   # of f: 0.75 in [0, 1]",
        "│  │  └─ from t0.1 = gamma * share * (gate * (own + received)) = 0.60885",
        "│  │     ├─ gate of t0.1 = 1   # sub-reward 0.625 above threshold 0.5",
        "├─ baseline = -0.319325   # 2 trajectories with agent=plan turn=0 policy=default version=0",
        "└─ divisor = spread + 1e-06 = 0.959085",
    ):
        assert line in lines
    mean = "sub_reward = (weight_1 * score_1 + weight_2 * score_2) / (weight_1 + weight_2) = 0.625"
    assert mean in str(explain(chain(), "t0.1"))


def test_explanation_shows_the_spreads_behind_a_weight():
    trajectories = [make_trajectory(f"t{n}", [step("a", 0.1 * n)], float(n > 1)) for n in range(4)]
    chosen = {"propagation": "decoupled", "w_r": 2.0, "group_by": "agent"}
    scores, outcomes = np.std([0.0, 0.1, 0.2, 0.3], ddof=1), np.std([0, 0, 1, 1], ddof=1)
    text = str(explain(credited(*trajectories, **chosen), 0))
    assert f"score_weight = w_r * (outcome_spread / score_spread) = {2 * outcomes / scores:.6g}" in text
    assert f"outcome_spread = {outcomes:.6g}" in text
    assert f"score_spread = {scores:.6g}" in text
    equal = [make_trajectory(f"t{n}", [step("a", 0.5)], float(n)) for n in range(2)]
    assert "score_weight = w_r = 2" in str(explain(credited(*equal, **chosen), 0))


def test_masked_step_has_advantage_zero_and_a_reason():
    batch = batch_of(
        make_trajectory("t0", [step("a", "failed")], 1.0),
        make_trajectory("t1", [step("a", 0.5)], 0.0),
        make_trajectory("t2", [step("a", 1.0)], 0.0),
    )
    story = explain(assign(batch, credit_options(propagation="threshold")), 0)
    assert story.advantage == 0.0
    assert story.operations[-1].note == "its scoring failed"


@pytest.mark.parametrize("unknown", ["t9.0", 99, -1])
def test_explain_rejects_an_unknown_step(unknown):
    with pytest.raises(BatchError, match="explain: expected"):
        explain(chain(), unknown)


def test_explain_rejects_a_token_outside_the_sampled_ones():
    batch = batch_of(
        make_trajectory("t0", [step("a", tokens=2)], 1.0), make_trajectory("t1", [step("a", tokens=2)], 0.0)
    )
    with pytest.raises(BatchError, match=r"step t0\.0: expected one of its sampled tokens, got token 2"):
        explain(assign(batch, credit_options(propagation="threshold")), 0, 2)


def test_explanation_lists_each_child_once():
    children = 500
    trajectories = [
        make_trajectory(f"t{n}", [step("plan"), *(step("write", n, parents=[0]) for _ in range(children))], n)
        for n in (0.0, 1.0)
    ]
    story = explain(credited(*trajectories, propagation="discounted"), 0)
    (received,) = [o for o in story.operations if o.name == "received"]
    assert (received.formula, len(received.inputs)) == ("sum", children)
    assert len([o for o in story.operations if o.name == "gamma"]) == 1
    assert story.replay() == story.advantage


# ---- rules and estimators of users ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class NothingLikeTheFormula(OutcomeRule):
    def formulas(self, options):
        return {"own": ("paid / (paid - paid)",)}  # of no value

    def credit(self, inputs):
        paid_S = self.pay(inputs)
        bits_S = np.full(paid_S.shape, 3, dtype=np.uint8)
        return Credit(3.0 * paid_S + 0.1, paid_S[::-1].copy(), np.full_like(paid_S, -0.3), bits_S, paid_S=paid_S)


@dataclass(frozen=True)
class WithGatesOfItsOwn(NothingLikeTheFormula):
    def credit(self, inputs):
        made = super().credit(inputs)
        return replace(made, gate_S=np.full_like(made.own_S, 0.5))


def varied(n=4):
    """A batch of trajectories with token scores, plain scores and a failed score."""
    by_token = [Score((k / 4, 0.75, 0.125), (0.0, 1.0)) for k in range(n)]
    return batch_of(
        *(
            make_trajectory(
                f"t{k}",
                [
                    step("plan", {"f": by_token[k]}, tokens=3),
                    step("write", "failed" if k == 2 else 1 - k / 8, tokens=2),
                    step("verify", k / 4),
                ],
                float(k == 1),
            )
            for k in range(n)
        )
    )


@pytest.mark.parametrize("granularity", ["step", "token_level"])
@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus", "gae"])
@pytest.mark.parametrize("rule", [NothingLikeTheFormula, WithGatesOfItsOwn])
def test_explain_gives_the_credit_of_a_custom_rule(rule, estimator, granularity):
    batch, values_T = varied(), np.linspace(-0.5, 0.7, 20)
    if estimator == "gae" and rule is NothingLikeTheFormula:
        return  # refused: gae needs the gates of the flow
    with registered(PROPAGATION_RULES, "theirs"):
        propagation_rule("theirs")(rule)
        chosen = credit_options(
            propagation="theirs",
            adv_estimator=estimator,
            decomp_granularity=granularity,
            gamma_token=0.5,
            outcome_to="answer",
        )
        assigned = assign(batch, chosen, values_T=values_T if estimator == "gae" else None)
        assert assigned.advantage.advantage_S.any()
        assert_explained(assigned)
        s = int(np.flatnonzero(assigned.advantage.learns_S)[0])
        story = explain(assigned, s, sampled_tokens(batch, s)[-1])
        (own,) = [o for o in story.operations if o.name == "own"]
        assert (own.formula, own.note) == ("", "by theirs")


def their_critic(inputs):
    """A critic with another formula than gae."""
    values_T = inputs.values_T
    unscaled_T = np.repeat(inputs.credit.total_S, np.diff(inputs.batch.token_offsets)) - 0.7 * values_T
    nothing_S = np.zeros_like(inputs.credit.total_S)
    terms = CriticTerms(values_T, np.empty(0), nothing_S, nothing_S, nothing_S)
    return Estimate(np.zeros_like(inputs.credit.total_S), unscaled_T=unscaled_T, critic=terms)


def unlike_by_token(inputs):
    position_T = np.arange(int(inputs.batch.token_offsets[-1]))
    unscaled_T = np.repeat(inputs.credit.total_S, np.diff(inputs.batch.token_offsets)) + np.sin(position_T)
    return Estimate(inputs.groups.mean_S, np.full_like(inputs.credit.total_S, 0.3), unscaled_T=unscaled_T)


def half_of_the_spread(inputs):
    return Estimate(0.9 * inputs.groups.others_S, 0.5 * inputs.groups.spread_S + 0.01)


@pytest.mark.parametrize("granularity", ["step", "token_level"])
@pytest.mark.parametrize(
    ("estimate", "kind"),
    [
        (their_critic, {"critic": True, "grouped": False, "whitened": True}),
        (unlike_by_token, {}),
        (half_of_the_spread, {}),
    ],
)
def test_explain_gives_the_values_of_a_custom_estimator(estimate, kind, granularity):
    values_T = np.linspace(-0.5, 0.7, 20)
    with registered(ADVANTAGE_ESTIMATORS, "theirs"):
        advantage_estimator("theirs", **kind)(estimate)
        chosen = credit_options(
            adv_estimator="theirs", propagation="threshold", decomp_granularity=granularity, outcome_to="answer"
        )
        assigned = assign(varied(), chosen, values_T=values_T)
        assert assigned.advantage.advantage_S.any()
        assert_explained(assigned)


# ---- gates ---------------------------------------------------------------------------------------------------------


def gates_of(assigned, s):
    """The gates in the explanation of step `s`, as {name: (factor, note)}."""
    return {o.name: (o.value, o.note) for o in explain(assigned, s).operations if o.name.startswith("gate ")}


def halves(**chosen):
    """Sub-rewards equal to the threshold, so that gates are closed."""
    return credited(
        *(make_trajectory(f"t{n}", [step("plan", 0.5), step("write", 0.5)], float(n)) for n in range(2)), **chosen
    )


@pytest.mark.parametrize(
    ("keys", "gate"),
    [
        ({}, (0.0, "sub-reward 0.5 not above threshold 0.5")),
        ({"propagation": "discounted"}, (1.0, "by discounted")),
        ({"reward_decomp": False}, (1.0, "open: without a score that counts")),
    ],
)
def test_explanation_describes_each_gate(keys, gate):
    assert gates_of(halves(**keys), 0) == {"gate of t0.1": gate}


def test_explanation_describes_the_gate_of_a_failed_step():
    batch = batch_of(
        *(make_trajectory(f"t{n}", [step("plan", n / 2), step("write", 0.5 if n else "failed")], 1.0) for n in range(3))
    )
    assigned = assign(batch, credit_options(propagation="threshold"))
    assert gates_of(assigned, 0)["gate of t0.1"] == (1.0, "open: its scoring failed")


def test_explanation_describes_a_gate_opened_by_the_floor():
    assigned = halves(propagation_threshold={**QUANTILE, "range": [0.6, 0.9]})
    assert assigned.credit.forced_open_S.any()
    s = int(np.flatnonzero(assigned.credit.forced_open_S & (assigned.batch.index_of_step == 1))[0])
    name = assigned.batch.step_ids[s]
    words = "sub-reward 0.5 not above threshold 0.75, opened to keep the floor"
    assert gates_of(assigned, s - 1)[f"gate of {name}"] == (1.0, words)


# ---- terms and columns ---------------------------------------------------------------------------------------------


def test_learning_step_with_advantage_zero_has_terms():
    trajectories = [make_trajectory(f"t{n}", [step("plan", r)], 0.0) for n, r in enumerate((0.0, 0.5, 1.0))]
    story = explain(credited(*trajectories, gamma=1.0), 1)
    assert story.advantage == 0.0
    assert [part.name for part in story.terms] == ["own", "received", "shared", "baseline"]
    assert story.terms[0].value < 0 < story.terms[-1].value


def test_step_that_does_not_learn_has_empty_terms():
    assert explain(halves(reward_decomp=False, group_by="task_agent_turn", w_o=0.0), 0).terms == ()
