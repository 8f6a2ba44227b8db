"""Tests of the rules that convert spans to trajectories, one at a time."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditflow.data import Trajectory
from creditflow.plugins.traces import ConvertOptions, Span, convert
from creditflow.plugins.traces.spans import Link, SpanEvent


def span(name: str, start: int | None, end: int | None, parent: str | None = None, **attributes: Any) -> Span:
    given = {key.replace("__", "."): value for key, value in attributes.items()}
    return Span("t", name, parent, name, start, end, given)


def call(name: str, start: int | None, end: int | None, parent: str | None = None, **attributes: Any) -> Span:
    """A call with prompt `read` and response `wrote`; the defaults contain the span's name."""
    read, wrote = attributes.pop("read", f"do {name}"), attributes.pop("wrote", f"response of {name}")
    for side, role, text in (("input", "user", read), ("output", "assistant", wrote)):
        message = {"role": role, "parts": [{"type": "text", "content": text}]}
        attributes[f"gen_ai__{side}__messages"] = json.dumps([message])
    return span(name, start, end, parent, gen_ai__operation__name="chat", **attributes)


def agent(name: str, start: int, end: int, parent: str | None = None) -> Span:
    return span(name, start, end, parent, gen_ai__operation__name="invoke_agent", gen_ai__agent__name=name)


def reward(at: int, value: Any = 1.0, name: str = "right", parent: str | None = None, **attributes: Any) -> Span:
    values = {"agentlightning__reward__0__name": name, "agentlightning__reward__0__value": value}
    return span(f"reward at {at}", at, at + 1, parent, **values, **attributes)


def one(spans: list[Span], **options: Any) -> Trajectory:
    (trajectory,) = convert(spans, ConvertOptions(**options)).trajectories
    return trajectory


def scores(trajectory: Trajectory) -> list[dict[str, float]]:
    return [{name: score.rescaled for name, score in step.scores.items()} for step in trajectory.steps]


TRAJECTORY = [agent("plan", 0, 10), call("a", 1, 5, "plan"), agent("write", 10, 40), call("b", 11, 15, "write"),
        call("c", 20, 25, "write"), call("d", 50, 60)]  # fmt: skip


def test_steps_are_in_order_of_time() -> None:
    trajectory = one(TRAJECTORY[::-1])
    assert [(step.agent, step.turn) for step in trajectory.steps] == [
        ("plan", 0), ("write", 0), ("write", 1), ("agent", 0)]  # fmt: skip
    assert [step.info["span_id"] for step in trajectory.steps] == ["a", "b", "c", "d"]
    assert [step.info["done"] for step in trajectory.steps] == [False, False, False, True]
    assert (trajectory.answer, trajectory.answer_steps) == ("response of d", (3,))


# ---- rewards -------------------------------------------------------------------------------------------------------


def test_link_precedes_agent_and_agent_precedes_time() -> None:
    linked = reward(30, 0.25, "linked", "write")
    linked.links = [Link("t", "a")]
    found = scores(one([*TRAJECTORY, linked, reward(31, 0.5, "mine", "write"), reward(70, 0.75, "mine", "plan")]))
    assert found == [{"linked": 0.25, "mine": 0.75}, {}, {"mine": 0.5}, {}]


def test_reward_by_time_belongs_to_the_last_ended_step() -> None:
    assert scores(one([*TRAJECTORY, reward(18), reward(30, 0.5)])) == [{}, {"right": 1.0}, {"right": 0.5}, {}]


def test_reward_after_all_steps_is_the_outcome() -> None:
    trajectory = one([*TRAJECTORY, reward(61, 0.5)])
    assert trajectory.outcome is not None
    assert (trajectory.outcome.value, trajectory.info["outcome"], scores(trajectory)) == (0.5, "right", [{}] * 4)


def test_last_reward_of_a_series_is_not_the_outcome() -> None:
    trajectory = one([*TRAJECTORY, reward(18), reward(61, 0.5)])
    assert trajectory.outcome is None
    assert scores(trajectory) == [{}, {"right": 1.0}, {}, {"right": 0.5}]


def test_outcome_option_names_the_reward() -> None:
    trajectory = one([*TRAJECTORY, reward(18, 0.25, "total"), reward(61, 0.5)], outcome="total")
    assert trajectory.outcome is not None
    assert trajectory.outcome.value == 0.25
    assert trajectory.info["rewards"] == {"right": 0.5}


def test_reward_of_a_left_out_call_is_unassigned() -> None:
    unheard = span("b", 11, 12, gen_ai__operation__name="chat")
    made = convert([call("a", 1, 2), unheard, reward(13, 0.0), call("c", 20, 21)])
    assert scores(made.trajectories[0]) == [{}, {}]
    assert [left.reason for left in made.left_out if left.what == "reward"] == [
        "the call that it belongs to is left out: neither messages nor a response were recorded in a form that is known"
    ]


def test_empty_repeated_record_takes_no_reward() -> None:
    for same in ({"parent": "a"}, {"gen_ai__response__id": "1"}):
        unheard = span("b", 2, 3, gen_ai__operation__name="chat", **same)
        found = one([call("a", 1, 4, gen_ai__response__id="1"), unheard, reward(13, 0.0), call("c", 20, 21)])
        assert scores(found) == [{"right": 0.0}, {}]


@pytest.mark.parametrize("wanted", ["", "writer"])
def test_outcome_is_independent_of_agent_match(wanted: str) -> None:
    spans = [call("a", 1, 2, gen_ai__agent__name="writer"), reward(3, 1.0, "style"),
             call("b", 4, 5, gen_ai__agent__name="verifier"), reward(6, 0.0, "final")]  # fmt: skip
    found = one(spans, agent_match=wanted)
    assert (found.info["outcome"], found.outcome and found.outcome.value) == ("final", 0.0)
    assert scores(found)[0] == {"style": 1.0}


OWN = {"creditflow__reward__good": 0.5}


@pytest.mark.parametrize(
    ("where", "whose"),
    [
        (span("chapter", 9, 30, **OWN), [{}, {"good": 0.5}, {}]),  # around b alone
        (span("tool", 16, 17, **OWN), [{}, {"good": 0.5}, {}]),  # after b, around no call
        (span("tool", 1, 2, **OWN), "no step had ended by then"),
    ],
)
def test_reward_on_other_span_belongs_to_last_call(where: Span, whose: Any) -> None:
    calls = [call("a", 4, 6), call("b", 10, 15, "chapter"), call("c", 40, 45)]
    made = convert([*calls, where])
    if isinstance(whose, str):
        assert [left.reason for left in made.left_out] == [whose]
    else:
        assert scores(made.trajectories[0]) == whose


def test_unnamed_reward_on_a_last_span_is_the_outcome() -> None:
    found = one([call("a", 4, 6), span("evaluate", 7, 8, creditflow__reward=0.25)])
    assert (found.info["outcome"], found.outcome and found.outcome.value) == ("reward", 0.25)


@given(st.data())
def test_reward_on_a_span_matches_a_plain_search(data: st.DataObject) -> None:
    """Compare with a plain search over all spans inside. One call is always outside the span, and one inside."""
    n = data.draw(st.integers(4, 12))
    parents = [-1, -1, 1] + [data.draw(st.integers(-1, at - 1)) for at in range(3, n)]
    is_call = [True, False, True] + [data.draw(st.booleans()) for _ in range(3, n)]
    ends = data.draw(st.permutations(range(10, 10 + n)))
    inside = {1}
    for child in range(2, n):
        if parents[child] in inside:
            inside.add(child)
    spans = [
        (call if is_call[at] else span)(str(at), 1, ends[at], None if parents[at] < 0 else str(parents[at]))
        for at in range(n)
    ]
    spans[1].attributes, spans[1].end = {"creditflow.reward.good": 1.0}, 100
    last = max((at for at in inside if is_call[at]), key=lambda at: ends[at])
    assert {step.info["span_id"] for step in one(spans).steps if step.scores} == {str(last)}


def test_link_pairs_resolve_in_any_order() -> None:
    calls = [call(f"s{at}", 10 * at, 10 * at + 5) for at in range(100)]
    for pairs in (("trace_id", "span_id"), ("span_id", "trace_id")):
        link = {f"agentlightning__link__{at}__key_match": key for at, key in enumerate(pairs)}
        link |= {f"agentlightning__link__{at}__value_match": {"trace_id": "t", "span_id": "s80"}[key]
                 for at, key in enumerate(pairs)}  # fmt: skip
        found = one([*calls, reward(2000, **link)])
        assert [at for at, score in enumerate(scores(found)) if score] == [80]


def test_label_without_a_number_is_unassigned() -> None:
    labelled = {"gen_ai.evaluation.name": "safe", "gen_ai.evaluation.score.label": "pass"}
    rated = call("a", 1, 2, evaluations__0__evaluation__name="kind", evaluations__0__evaluation__label="yes")
    rated.events = [SpanEvent("gen_ai.evaluation.result", labelled)]
    made = convert([rated])
    assert sorted((left.name, left.reason) for left in made.left_out) == [
        ("kind", "it is no number, but a label: 'yes'"),
        ("safe", "it is no number, but a label: 'pass'"),
    ]
    assert made.trajectories[0].steps[0].scores == {}


def test_agent_around_all_steps_is_ignored() -> None:
    inside = [agent("all", 0, 100), *(call(name, 10 * at, 10 * at + 5, "all") for at, name in enumerate("abc"))]
    trajectory = one([*inside, reward(16, 0.5, "right", "all"), reward(90, 1.0, "total", "all")])
    assert scores(trajectory) == [{}, {"right": 0.5}, {}]
    assert trajectory.outcome is not None


def test_all_reward_dimensions_are_kept() -> None:
    more = {"agentlightning__reward__1__name": "style", "agentlightning__reward__1__value": 0.5}
    last = {"agentlightning__reward__1__name": "outcome", "agentlightning__reward__1__value": 1.0}
    trajectory = one([*TRAJECTORY, reward(18, **more), reward(70, 0.0, "speed", **last)])
    assert scores(trajectory)[1] == {"right": 1.0, "style": 0.5}
    assert trajectory.outcome is not None
    assert (trajectory.outcome.value, trajectory.info["rewards"]) == (1.0, {"speed": 0.0})


@pytest.mark.parametrize("value", [None, "much", math.nan, math.inf, 10**400, [1]])
def test_non_numeric_reward_has_failed(value: Any) -> None:
    (score,) = one([*TRAJECTORY, reward(18, value)]).steps[1].scores.values()
    assert (score.status, math.isnan(score.rescaled)) == ("failed", True)
    assert "expected a number" in score.reason


def test_reward_outside_its_range_has_failed() -> None:
    (score,) = one([*TRAJECTORY, reward(18, -1.0)]).steps[1].scores.values()
    assert (score.status, score.reason) == ("failed", "expected a value in [0, 1], got -1; give the reward's range")
    assert scores(one([*TRAJECTORY, reward(18, -0.5)], ranges={"right": (-1.0, 1.0)}))[1] == {"right": 0.25}


@pytest.mark.parametrize(("value", "expected"), [(0.1 * 0.1 * 100, 1.0), (-1e-17, 0.0)])
def test_reward_beyond_by_rounding_is_clipped(value: float, expected: float) -> None:
    (score,) = one([*TRAJECTORY, reward(18, value)]).steps[1].scores.values()
    assert (score.status, score.value) == ("ok", expected)


def test_repeated_reward_counts_the_second_time() -> None:
    made = convert([*TRAJECTORY, reward(26, 0.0), reward(27, 1.0)])
    assert scores(made.trajectories[0])[2] == {"right": 1.0}
    assert [(left.span, left.reason) for left in made.left_out] == [("reward at 26", "given again later")]


def test_calls_inside_a_reward_span_are_left_out() -> None:
    judge = reward(27, parent="write")
    judge.end = 40
    made = convert([*TRAJECTORY, judge, call("judge", 28, 30, "reward at 27")])
    assert len(made.trajectories[0].steps) == 4
    assert [(left.span, left.reason) for left in made.left_out] == [("judge", "made by a reward")]


def test_reward_attributes_belong_to_their_span() -> None:
    spans = [span("root", 0, 100, creditflow__reward__outcome=0.5)]
    spans += [call("a", 1, 5, "root", creditflow__reward__right=1.0), agent("write", 10, 20, "root")]
    spans[-1].attributes = {**spans[-1].attributes, "creditflow.reward.style": 0.25}
    spans += [call("b", 11, 12, "write"), call("c", 13, 14, "write")]
    trajectory = one(spans)
    assert scores(trajectory) == [{"right": 1.0}, {}, {"style": 0.25}]
    assert trajectory.outcome is not None
    assert trajectory.outcome.value == 0.5


def test_otel_and_openinference_evaluations_are_rewards() -> None:
    spans = [call("a", 1, 5, gen_ai__response__id="r1"), call("b", 6, 9)]
    score = {"gen_ai.evaluation.name": "right", "gen_ai.evaluation.score.value": 0.5}
    spans[0].events = [SpanEvent("gen_ai.evaluation.result", score)]
    of_a = {**score, "gen_ai.evaluation.name": "of a", "gen_ai.response.id": "r1"}
    spans[1].events = [SpanEvent("gen_ai.evaluation.result", of_a)]
    style = {"evaluations.0.evaluation.name": "style", "evaluations.0.evaluation.score": 1.0}
    liked = {"trace.annotations.0.annotation.name": "liked", "trace.annotations.0.annotation.score": 0.0}
    spans[1].attributes = {**spans[1].attributes, **style, **liked}
    trajectory = one(spans)
    assert scores(trajectory) == [{"right": 0.5, "of a": 0.5}, {"style": 1.0}]
    assert trajectory.outcome is not None
    assert trajectory.info["outcome"] == "liked"


# ---- calls ---------------------------------------------------------------------------------------------------------


def test_unmatched_agents_lose_calls_and_rewards() -> None:
    rewarded = [*TRAJECTORY, reward(30, parent="write"), reward(8, 0.5, "good", "plan")]
    made = convert(rewarded, ConvertOptions("plan|agent"))
    assert [step.agent for step in made.trajectories[0].steps] == ["plan", "agent"]
    assert [(left.what, left.reason) for left in made.left_out] == [
        *[("model call", "agent 'write' is not asked for")] * 2,
        ("reward", "the call that it belongs to is left out: agent 'write' is not asked for"),
    ]
    assert scores(made.trajectories[0]) == [{"good": 0.5}, {}]


def test_repeated_call_keeps_the_fuller_record() -> None:
    spans = [call("outer", 1, 9, gen_ai__response__id="r", wrote="yes"), call("inner", 2, 8, "outer",
             gen_ai__response__id="r", response_token_ids=[1, 2], wrote="yes")]  # fmt: skip
    linked = reward(20)
    linked.links = [Link("t", "outer")]
    made = convert([*spans, linked])
    (step,) = made.trajectories[0].steps
    assert (step.response_ids, step.info["span_id"], list(step.scores)) == ((1, 2), "inner", ["right"])
    assert [left.reason for left in made.left_out] == ["the same call as span inner"]


def test_nested_call_with_the_same_response_is_one() -> None:
    made = convert([call("outer", 1, 9, wrote="yes"), call("inner", 2, 8, "outer", wrote="yes")])
    assert [step.info["span_id"] for step in made.trajectories[0].steps] == ["outer"]
    for more in ({"read": "You add. Sum?"}, {"gen_ai__request__model": "m"}):
        made = convert([call("outer", 1, 9, wrote="yes"), call("inner", 2, 8, "outer", wrote="yes", **more)])
        assert [step.info["span_id"] for step in made.trajectories[0].steps] == ["inner"]
    made = convert([call("outer", 1, 9, wrote="yes"), call("inner", 2, 8, "outer", wrote="no")])
    assert len(made.trajectories[0].steps) == 2


def test_call_without_a_response_is_left_out() -> None:
    failed = span("f", 1, 2, gen_ai__operation__name="chat")
    failed.error = "rate limit"
    made = convert([failed, span("g", 3, 4, gen_ai__operation__name="chat")])
    assert made.trajectories == []
    assert [left.reason for left in made.left_out] == [
        "it failed: rate limit", "neither messages nor a response were recorded in a form that is known"]  # fmt: skip


def test_missing_logprobs_of_trace_tokens_are_nan() -> None:
    step = one([call("a", 1, 2, prompt_token_ids=[1, 2], response_token_ids="[3, 4]")]).steps[0]
    assert (step.prompt_ids, step.response_ids, step.response_mask) == ((1, 2), (3, 4), (1, 1))
    assert all(math.isnan(value) for value in step.logprobs)
    logprobs = json.dumps([{"token": "x", "logprob": -0.5}, {"token": "y", "logprob": -1}])
    step = one([call("a", 1, 2, response_token_ids=[3, 4], logprobs__content=logprobs)]).steps[0]
    assert step.logprobs == (-0.5, -1.0)
    step = one([call("a", 1, 2, response_token_ids=[3, 4, 5], logprobs__content=logprobs)]).steps[0]
    assert all(math.isnan(value) for value in step.logprobs)


def test_calls_that_share_a_response_id_are_two() -> None:
    same = {"gen_ai__response__id": "chatcmpl-1"}
    made = convert([call("a", 1, 2, **same), call("b", 3, 4, **same), call("c", 5, 6, wrote="response of b", **same),
                    reward(8, response_id="x", agentlightning__link__0__key_match="gen_ai.response.id",
                           agentlightning__link__0__value_match="chatcmpl-1")])  # fmt: skip
    (trajectory,) = made.trajectories
    assert [step.info["span_id"] for step in trajectory.steps] == ["a", "b"]
    assert [left.reason for left in made.left_out] == ["the same call as span b"]
    assert scores(trajectory) == [{}, {"right": 1.0}]  # the last call with that id


# ---- parents and times ---------------------------------------------------------------------------------------------


def test_parents_come_from_text_and_else_from_time() -> None:
    spans = [call("a", 0, 2, wrote="the plan is long"), call("b", 3, 4), call("c", 5, 6, read="Do: the plan is long!")]
    trajectory = one(spans)
    assert [(step.parents, step.info["parents_by"]) for step in trajectory.steps] == [
        ((), "time"), ((0,), "time"), ((0,), "text")]  # fmt: skip


def test_missing_and_skewed_times_are_repaired() -> None:
    made = convert([call("a", 5, None), call("b", None, 9), call("c", None, None), call("d", 20, 11)])
    assert [step.info["span_id"] for step in made.trajectories[0].steps] == ["a", "b", "c", "d"]
    assert dict(made.mended) == {"a time that is missing, or an end before its start": 4}


# ---- trajectories --------------------------------------------------------------------------------------------------


def test_trajectories_split_by_trace_or_attribute() -> None:
    spans = [span("x", 0, 9, session="one"), call("a", 1, 2, "x"), span("y", 0, 9, session="two"), call("b", 3, 4, "y")]
    spans.append(call("c", 5, 6))
    assert len(one(spans).steps) == 3
    spans += [replace(call(trace, 7, 8, session=""), trace=trace) for trace in "uv"]  # empty values are missing ones
    made = convert(spans, ConvertOptions(trajectory_by="session"))
    assert {trajectory.id: [step.info["span_id"] for step in trajectory.steps] for trajectory in made.trajectories} == {
        "one": ["a"], "two": ["b"], "t": ["c"], "u": ["u"], "v": ["v"]}  # fmt: skip


def test_trajectories_with_one_first_prompt_share_a_task() -> None:
    spans = [call("a", 1, 2, read="Add 3 and 4."), call("b", 1, 2, read="Add 3 and 4."), call("c", 1, 2)]
    for number, trajectory in enumerate(spans):
        trajectory.trace = str(number)
    first, second, third = convert(spans).trajectories
    assert first.uid == second.uid != third.uid
    spans.append(replace(span("d", 0, 1, task=""), trace="2"))
    spans[2].attributes = {**spans[2].attributes, "task": "T"}
    assert convert(spans, ConvertOptions(uid_by="task")).trajectories[2].uid == "T"


def test_task_is_independent_of_agent_match() -> None:
    spans = []
    for number in range(3):
        plan = call("p", 1, 2, read="Add 3 and 4.", wrote=f"plan {number} is long", gen_ai__agent__name="planner")
        work = call("w", 3, 4, read=f"plan {number} is long", gen_ai__agent__name="writer")
        spans += [replace(one, trace=str(number)) for one in (plan, work)]
    trajectories = convert(spans, ConvertOptions("writer")).trajectories
    assert len({trajectory.uid for trajectory in trajectories}) == 1
    assert trajectories[0].task.text == "Add 3 and 4."


def test_linked_traces_form_one_trajectory() -> None:
    def moved(span: Span, trace: str, *links: Link) -> Span:
        return replace(span, trace=trace, links=links)

    spans = [
        moved(call("a", 0, 5), "first"),
        moved(call("b", 10, 15, read="response of a"), "second", Link("first", "a")),
        moved(call("c", 20, 25, read="response of b"), "third", Link("second", "b"), Link("second", "x")),
        moved(reward(30, 0.5), "scored", Link("third", "c")),
        moved(call("d", 0, 5), "other"),
        moved(span("batch", 40, 41), "evaluation", Link("third", "c"), Link("other", "d")),
        moved(call("e", 50, 55), "lost", Link("nowhere", "z")),
    ]
    for order in (spans, spans[::-1]):
        made = convert(order).trajectories
        assert {tuple(step.response for step in trajectory.steps) for trajectory in made} == {
            ("response of a", "response of b", "response of c"),
            ("response of d",),
            ("response of e",),
        }
        (trajectory,) = (trajectory for trajectory in made if len(trajectory.steps) == 3)
        assert [step.parents for step in trajectory.steps] == [(), (0,), (1,)]
        assert scores(trajectory) == [{}, {}, {"right": 0.5}]
    by_name = convert([replace(one, resource={"run": one.trace}) for one in spans], ConvertOptions(trajectory_by="run"))
    assert len(by_name.trajectories) == 5
