"""Tests of the reward `format`: patterns and schemas, at load and on texts by models."""

import json
import pickle
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditflow.rewards.builtin.format import MAX_CHARACTERS, Format
from tests.builders import examples, make_trajectory, step
from tests.paths import GSM8K
from tests.rewards.trajectories import load, score

SOLUTIONS = [json.loads(line)["answer"] for line in (GSM8K).open(encoding="utf8")]
PLAN = {
    "type": "object",
    "required": ["steps"],
    "properties": {"steps": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/step"}}},
    "patternProperties": {"^p$": {"multipleOf": 0.01}},
    "$defs": {"step": {"type": "object", "required": ["do"], "properties": {"do": {"type": "string"}}}},
}
GOOD = '{"steps": [{"do": "add"}]}'


@pytest.mark.parametrize("solution", SOLUTIONS[:8])
def test_published_solutions_end_in_a_marked_answer(solution):
    assert Format(pattern=r"#### -?[\d,.]+", where="end").fault(solution) == ""
    assert Format(pattern=r"#### -?[\d,.]+", where="start").fault(solution) == "the pattern matches not its start"
    assert Format(pattern=r"(?s).+\n#### -?[\d,.]+").fault(solution) == ""


@pytest.mark.parametrize(
    ("pattern", "where", "matching", "other"),
    [
        ("ab", "all", "ab", ["abc", "cab", "ab\n", "AB"]),
        ("ab", "start", "abc", ["cab"]),
        ("ab", "end", "cab", ["abc", "ab\n"]),
        ("ab", "anywhere", "cabc", ["ba", ""]),
        ("a|ab", "all", "ab", []),
        ("(?i)yes|no", "all", "NO", []),
        ("(?x) a b  # a comment", "end", "cab", []),
        ("(?m)^b$", "anywhere", "a\nb", []),
        ("(?m)b", "end", "cb", ["b\nc"]),
        (".*", "anywhere", "a" * MAX_CHARACTERS, ["a" * (MAX_CHARACTERS + 1)]),
    ],
)
def test_pattern_must_match_at_its_place(pattern, where, matching, other):
    assert Format(pattern=pattern, where=where).fault(matching) == ""
    assert all(Format(pattern=pattern, where=where).fault(text) for text in other)


@pytest.mark.parametrize(
    ("where", "text", "fault"),
    [
        ("all", f" {GOOD}\n", ""),
        ("all", f"Plan: {GOOD}", "not JSON: Expecting value"),
        ("all", '{"steps": []}', "$.steps: "),
        ("all", '{"steps": [{"do": "add"}, {"do": 5}]}', "$.steps[1].do: 5 is not of type 'string'"),
        ("all", f'{{"p": 19.99, {GOOD[1:]}', ""),
        ("all", f'{{"p": 19.995, {GOOD[1:]}', "$.p: 19.995 is not a multiple of 0.01"),
        ("all", f'{{"p": 1e999, {GOOD[1:]}', "cannot be checked"),
        ("all", '{"steps": NaN}', "not JSON: NaN is no JSON"),
        ("all", "[" * 50_000, "JSON nested too deep"),
        ("all", "9" * 5_000, "not JSON: "),
        ("fence", f"Here:\n```json\n{GOOD}\n```\nDone.", ""),
        ("fence", f"```json\n[]\n```\n```JSON\n{GOOD}```", ""),
        ("fence", '```json\n{"steps": [{"do": "```json\\n[]\\n```"}]}\n```', ""),
        ("fence", f"Here: ```json {GOOD[:-1]}\n}}\n```</answer>", ""),
        ("fence", f"```json {GOOD}```", ""),
        ("fence", f"```\n{GOOD}\n```", "no ```json fence"),
        ("fence", f"```json\n{GOOD}", "no ```json fence"),
        ("last", f'A set {{1, 2}} and "a quote {GOOD} as asked.', ""),
        ("last", f"An open {{ brace, then {GOOD}", ""),
        ("last", '{"steps": [{"do": "a } in a \\" string"}]} done', ""),
        ("last", f"{GOOD} then {{}}", "$: 'steps' is a required property"),
        ("last", "none", "no {...}"),
    ],
)
def test_json_is_checked_against_the_schema(where, text, fault):
    said = Format(schema=PLAN, where=where).fault(text)
    assert said.startswith(fault)
    assert bool(said) == bool(fault)


def test_remote_reference_is_refused_and_never_fetched(monkeypatch):
    def no_network(*args, **kwargs):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket, "socket", no_network)
    for reference in ("http://127.0.0.1:9/schema", "other.json", "file:///etc/passwd"):
        with pytest.raises(ValueError, match="references into the schema itself"):
            Format(schema={"properties": {"a": {"$ref": reference}}})
    assert Format(schema={"const": {"$ref": "http://127.0.0.1:9/"}}).fault('{"$ref": "http://127.0.0.1:9/"}') == ""


def test_deep_json_is_a_fault_not_a_crash():
    recursive = Format(schema={"$ref": "#/$defs/t", "$defs": {"t": {"items": {"$ref": "#/$defs/t"}}}})
    assert recursive.fault("[" * 20 + "]" * 20) == ""
    assert recursive.fault("[" * 700 + "]" * 700) == "JSON nested too deep"


def test_format_can_be_pickled_after_use():
    checker = Format(schema=PLAN)
    assert checker.fault(GOOD) == ""
    assert pickle.loads(pickle.dumps(checker)).fault(GOOD) == ""


def test_reason_names_the_mismatch():
    trajectory = make_trajectory("a", [step("planner", response=GOOD), step("planner", response="{}")])
    score([load("format", args={"schema": PLAN})], [trajectory])
    good, bad = (s.scores["format"] for s in trajectory.steps)
    assert (good.value, good.status, bad.value, bad.status) == (1.0, "ok", 0.0, "ok")
    assert bad.reason == "$: 'steps' is a required property"


HOSTILE = st.one_of(
    st.text(),
    st.text(alphabet='{}[]"\\:,0`json\n', max_size=60),
    st.builds(
        lambda piece, n: piece * n,
        st.sampled_from(['{"a":', "{", "}", '"', "[", "```json", "\\"]),
        st.integers(0, 3000),
    ),
)
MADE = [Format(pattern="a+b", where=w) for w in ("all", "start", "end", "anywhere")] + [
    Format(schema=PLAN, where=w) for w in ("all", "fence", "last")
]


@examples(60)
@given(HOSTILE)
def test_any_response_gets_a_score(text):
    for checker in MADE:
        assert isinstance(checker.fault(text), str)
