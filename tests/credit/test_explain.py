"""What `explain` lists gives, replayed, the very bits that were trained on."""

import math

import numpy as np
import pytest
from hypothesis import given, settings

from creditflow.credit import CreditOptions, assign, explain
from creditflow.errors import BatchError
from tests.builders import batch_of, play, step
from tests.credit.strategies import fixed, situations
from tests.credit.test_against_oracle import CORNERS


def sampled_tokens(batch, s):
    start, stop = batch.token_offsets[s], batch.token_offsets[s + 1]
    return np.flatnonzero(batch.response_mask[start:stop]).tolist()


@pytest.mark.parametrize("corner", CORNERS)
def test_replaying_the_operations_gives_the_trained_advantage_bit_for_bit(corner):
    @settings(fixed, max_examples=60)
    @given(situations(**CORNERS[corner]))
    def check(situation):
        trajectories, chosen, values_T = situation
        batch = batch_of(*trajectories)
        assigned = assign(batch, chosen, values_T=None if values_T is None else np.array(values_T))
        advantage_T = assigned.token_advantages()
        for s in range(batch.n_steps):
            story = explain(assigned, s)
            assert story.replay() == story.advantage == assigned.advantage_S[s]
            parts = math.fsum(value for _, value in story.terms)
            assert parts + story.rounding == pytest.approx(story.advantage, rel=1e-12, abs=1e-300)
            assert abs(story.rounding) <= 1e-11 * max([1.0, *(abs(value) for _, value in story.terms)])
            for token in sampled_tokens(batch, s):
                assert explain(assigned, s, token).replay() == advantage_T[batch.token_offsets[s] + token]

    check()


def chain(**chosen):
    return assign(
        batch_of(
            play("t0", [step("plan", 0.75), step("write", {"f": 0.25, "g": 1.0}), step("verify", 1.0)], 1.0),
            play("t1", [step("plan", 0.25), step("write", {"f": 1.0, "g": 0.5}), step("verify", 0.0)], 0.0),
        ),
        CreditOptions(**chosen),
    )


def test_an_explanation_names_every_child_with_its_gate_its_threshold_and_its_credit():
    text = str(explain(chain(gate="soft", outcome_to="answer"), "t0.0"))
    assert "h of t0.1" in text
    assert "sub-reward 0.625 above threshold 0.5" in text
    assert "2 trajectories with agent=plan turn=0" in text


def test_the_parts_for_people_add_up_to_the_advantage():
    story = explain(chain(), 0)
    names = [name for name, _ in story.terms]
    assert names == ["own", "from t0.1", "shared", "baseline"]
    assert sum(value for _, value in story.terms) == pytest.approx(story.advantage)
    assert abs(story.rounding) < 1e-15


def test_a_masked_step_has_advantage_zero_and_a_reason():
    batch = batch_of(
        play("t0", [step("a", "failed")], 1.0), play("t1", [step("a", 0.5)], 0.0), play("t2", [step("a", 1.0)], 0.0)
    )
    story = explain(assign(batch, CreditOptions()), 0)
    assert story.advantage == 0.0
    assert story.operations[-1].note == "its scoring failed"


def test_a_stand_in_is_named():
    worse = play("t0", [step("plan", 1.0), step("write", 0.0)], 0.0)
    better = play("t1", [step("plan", 1.0), step("write", 0.75)], 1.0)
    story = explain(assign(batch_of(worse, better), CreditOptions(on_closed_gate="neutral", gamma=1.0)), "t0.0")
    (stand_in,) = [o for o in story.operations if o.name == "stand-in for t0.1"]
    assert stand_in.value == -0.25


@pytest.mark.parametrize("unknown", ["t9.0", 99, -1])
def test_a_step_that_there_is_not_is_refused(unknown):
    with pytest.raises(BatchError, match="explain: expected"):
        explain(chain(), unknown)


def test_a_token_that_was_not_sampled_is_refused():
    batch = batch_of(play("t0", [step("a", tokens=2)], 1.0), play("t1", [step("a", tokens=2)], 0.0))
    with pytest.raises(BatchError, match=r"step t0\.0: expected one of its sampled tokens, got token 2"):
        explain(assign(batch, CreditOptions()), 0, 2)
