"""Random plays and options for properties of credit: small graphs of every shape, with every kind of mishap.

Values come from coarse grids, so that nothing lies within rounding of a threshold or a tie by accident.
"""

from hypothesis import settings
from hypothesis import strategies as st

from creditflow.credit import CreditOptions
from creditflow.trajectory import Score
from tests.builders import play, step

fixed = settings(derandomize=True, deadline=None, max_examples=100, database=None)
"""The same examples in every run: a test that fails now and then would be skipped over."""

eighths = st.integers(0, 8).map(lambda k: k / 8)


@st.composite
def scores(draw, failures=True):
    kinds = ["ok", "ok", "ok"] + (["failed", "timeout"] if failures else [])
    named = {}
    for name in draw(st.sampled_from([(), ("f",), ("f",), ("f",), ("f", "g"), ("m",), ("f", "m")])):
        weight = 0.0 if name == "m" else draw(st.sampled_from([0.5, 1.0, 3.0]))
        low, high = draw(st.sampled_from([(0.0, 1.0), (0.0, 1.0), (-1.0, 3.0)]))
        value = low + (high - low) * draw(eighths)
        named[name] = Score(value, (low, high), weight, draw(st.sampled_from(kinds)))
    return named


@st.composite
def plays(draw, mishaps=True, max_plays=5, max_steps=6, scores=scores):
    made = []
    for n in range(draw(st.integers(1, max_plays))):
        steps = []
        for index in range(draw(st.integers(1, max_steps))):
            chain = draw(st.booleans())
            earlier = st.sets(st.integers(0, index - 1), max_size=3) if index else st.just(set())
            steps.append(
                step(
                    draw(st.sampled_from("abc")),
                    draw(scores(failures=mishaps)),
                    parents=None if chain else tuple(sorted(draw(earlier))),
                    policy=draw(st.sampled_from(["p", "p", "p", "q"])),
                    policy_version=draw(st.sampled_from([0, 0, 0, 1])),
                    stratum=draw(st.sampled_from([None, None, "good", "bad"])),
                    prompt=draw(st.sampled_from(["x", "y"])),
                )
            )
        status = draw(st.sampled_from(["ok", "ok", "ok", "ok", "failed", "truncated"])) if mishaps else "ok"
        outcome = draw(st.one_of(eighths, st.sampled_from([None, "failed"]) if mishaps else eighths))
        answers = draw(st.sampled_from([(), (), (0,), tuple(range(len(steps)))]))
        task = draw(st.sampled_from(["q0", "q0", "q1"]))
        made.append(play(f"t{n}", steps, outcome, task, status=status, answer_steps=answers))
    return made


@st.composite
def options(draw, **fixed_values):
    chosen = {
        "propagation": draw(st.sampled_from(["identical", "uniform", "none", "discounted", "threshold"])),
        "outcome_to": draw(st.sampled_from(["all", "answer"])),
        "sub_reward_origin": draw(st.sampled_from([0.0, 0.5, 1.0])),
        "propagation_threshold": draw(st.sampled_from([0.1, 0.3, 0.5, 0.9])),
        "group_by": draw(
            st.sampled_from(["task", "task_agent", "task_agent_turn", "task_agent_state", "agent", "agent_turn"])
        ),
        "gamma": draw(st.sampled_from([0.0, 0.5, 0.99, 1.0])),
        "w_r": draw(st.sampled_from([0.0, 1.0, 2.0])),
        "w_o": draw(st.sampled_from([0.0, 1.0, 0.5])),
        "reward_decomp": draw(st.sampled_from([True, True, True, False])),
        "norm_adv_by_std_in_grpo": draw(st.booleans()),
        "shared_reward": draw(st.sampled_from(["outcome", "outcome_plus_mean_sub_reward"])),
        "gate_unscored": draw(st.sampled_from(["open", "closed"])),
        "mask_truncated": draw(st.booleans()),
    }
    return CreditOptions(**{**chosen, **fixed_values})
