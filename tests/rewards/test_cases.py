"""Tests of reading tests in all data set formats, and of judging the answers of a box; no box is opened."""

import datetime
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditflow.rewards.support.code_runner import MAX_DEPTH, OtherValue, decoded, encoded
from creditflow.rewards.support.test_cases import CaseCall, InputOutput, read_tests


def says(value: object) -> bytes:
    """The answer of a box with a solution that returned this value."""
    return json.dumps({"value": encoded(value)}).encode()


def passes(test: object, value: object) -> bool:
    (case,) = read_tests([test])
    assert isinstance(case, CaseCall)
    return not case.fault(says(value), "nonce")


@pytest.mark.parametrize(
    ("test", "right", "wrong"),
    [
        ({"call": "f(2, 3)", "expect": 5}, 5, 6),
        ({"call": "f(2, 3)", "expect": 5}, 5.0000001, 5.1),
        ({"call": "f()", "expect": [1, [0.1, "a"]]}, (1, [0.1 + 1e-12, "a"]), [1, [0.1]]),
        ({"call": "f()", "expect": {"1": [2]}}, {1: (2,)}, {1: 2}),
        ({"call": "f()", "expect": {"1": 3}}, {1: 3}, {1: 2, "1": 3}),
        ({"call": "f()", "expect": {"true": 1, "null": [{"2": 3}]}}, {True: 1, None: [{2: 3}]}, {"True": 1, "None": 2}),
        ({"call": "f()", "expect": [{1: (2,), None: {3}}]}, [{1: [2], None: {3}}], [{"1": [2], None: {3}}]),
        ({"call": "f()", "expect": None}, None, 0),
        ({"call": "f()", "expect": [1, 2]}, [1, complex(2)], {1, 2}),
        ({"call": "f()", "expect": math.nan}, math.nan, 0.0),
        ({"call": "f()", "expect": [10**5000]}, (10**5000,), [10**5000 + 1]),
    ],
)
def test_values_are_compared_outside_of_the_box(test, right, wrong):
    assert passes(test, right)
    assert not passes(test, wrong)


@pytest.mark.parametrize(
    "truth",
    [
        [{"call": "f(1)", "expect": 918273}],
        {"fn_name": "f", "inputs": [[1]], "outputs": [918273]},
        {"inputs": ["1\n"], "outputs": ["918273\n"]},
    ],
)
def test_expected_value_never_enters_the_box(truth):
    (case,) = read_tests(truth)
    assert "918273" not in case.stdin("nonce").decode()


def test_calls_in_apps_and_verl_formats_are_read():
    apps = {"fn_name": "add", "inputs": [[2, 3], [[1], 2]], "outputs": [[5], [[1, 2]]]}
    verl = json.dumps({"fn_name": "add", "inputs": ["2\n3", "[1]\n2"], "outputs": ["5", "[1, 2]"]})
    for truth in (apps, verl, json.dumps(apps)):
        first, second = read_tests(truth)
        assert json.loads(first.stdin("")) == {"fn": "add", "args": [2, 3]}
        assert json.loads(second.stdin("")) == {"fn": "add", "args": [[1], 2]}
        assert [first.fault(says(5), ""), second.fault(says((1, 2)), "")] == ["", ""]
        assert first.fault(says(6), "").startswith("wrong answer: expected")


WRONG = ("1 2\n3.0\n", "1  2\n3\n", " 1 2\n3\n", "1 2\n", "1 2\n\n3\n", "", "\ufffd")


@pytest.mark.parametrize("printed", ["1 2\n3\n", "1 2  \r\n3", "1 2\n3\n\n\n", *WRONG])
def test_output_is_compared_line_by_line_as_text(printed):
    (case,) = read_tests([{"input": "x", "output": "1 2\n3"}])
    assert isinstance(case, InputOutput)
    assert bool(case.fault(printed.encode(), "")) == (printed in WRONG)


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ("72", "expected tests, got 72"),
        ("so it is 24", "neither JSON nor Python"),
        ([], r"expected tests, got \[\]"),
        ({"inputs": [], "outputs": []}, r"expected tests, got \[\]"),
        ({"inputs": ["1"], "outputs": []}, "as many inputs as outputs"),
        ({"public_test_cases": "[]"}, "as many inputs as outputs, .* got keys .'public_test_cases'"),
        ({"fn_name": "f", "inputs": [3], "outputs": [3]}, "arguments of f as a list"),
        ([{"call": "f(1)"}], "test 0: expected input and output"),
        (["assert f(1) == 1", 5], "test 1: expected input and output"),
        (["assert f("], "test 0"),
        ("9" * 5000, "Exceeds the limit"),
        (["assert (f(1) == 1, 'one')"], "test 0: expected assertions that can fail, got one of a tuple"),
        ([{"call": "f(", "expect": 1}], "test 0: .* neither JSON nor Python"),
        ([{"input": "1", "output": " "}], "a test with an output"),
        ([{"input": {"x": 1}, "output": "1"}], "test 0: expected the input and output of a test as text"),
        ([{"call": "f()", "expect": [datetime.date(2020, 1, 1)]}], 'test 0: expected .* got "datetime.date'),
        ({"fn_name": "f", "inputs": [[range(2)]], "outputs": [1]}, "test 0: expected numbers, texts"),
        ("[" * 100_000, "neither|nested"),
        (["assert f(1) == " + "1" * 1_000_000], "at most 1000000 characters"),
        ([{"input": "1", "output": "1", "testtype": "functional"}], "test 0: expected the function's name"),
        ([{"input": "[1,\n2", "output": "1", "fn_name": "f"}], "^test 0: [^:]*, column 4$"),
        ([{"input": "1", "output": "1", "type": "regex"}], "test 0: expected a test of type"),
        ({"language": "cpp", "test_cases": [{"input": "1", "output": "1"}]}, "Python programs, got language 'cpp'"),
        (None, "expected tests, got None"),
    ],
)
def test_truth_without_tests_raises(truth, message):
    with pytest.raises(ValueError, match=message):
        read_tests(truth)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.integers() | st.text(max_size=3) | st.tuples(st.integers()), inner, max_size=4)
        | st.sets(st.integers() | st.text(max_size=3), max_size=4)
        | st.frozensets(st.integers(), max_size=4)
    ),
    max_leaves=12,
)


@given(PLAIN)
def test_plain_data_round_trips_through_the_box(value):
    back = decoded(json.loads(json.dumps(encoded(value))))
    assert back == value
    assert type(back) is type(value)


def test_subclasses_become_plain_and_objects_equal_nothing():
    class Five(int):
        def __eq__(self, other):
            return True

        __hash__ = None

    class Any:
        def __eq__(self, other):
            return True

        __hash__ = None

    assert (decoded(encoded(Five(5))) == 4, decoded(encoded(Five(5))) == 5) == (False, True)
    assert isinstance(decoded(encoded([Any()]))[0], OtherValue)
    assert not passes({"call": "f(2)", "expect": 5}, Any())


KINDS = st.sampled_from(["tuple", "set", "dict", "bytes", "ratio", "other", "value", "raised", "not_loaded", "nonce"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KINDS, inner, max_size=2),
    max_leaves=8,
)
CASES = read_tests([{"call": "f(1)", "expect": [1.5, {"a": 2}]}, {"call": "f(1)", "expect": 5}])
CASES += read_tests([{"input": "", "output": "5"}, "assert f(1) == 5"])


@given(JSON.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=40))
def test_any_answer_of_a_box_gets_a_verdict(answer):
    for said in (answer, b'{"value": ' + answer + b"}"):
        for case in CASES:
            assert isinstance(case.fault(said, "the word"), str)


DEEP = "[" * (MAX_DEPTH + 5) + "]" * (MAX_DEPTH + 5)
HOSTILE = ["[" * 100_000, DEEP, "9" * 10_000, "{}", '{"ratio": [1, 0]}', '{"set": [[1]]}', '{"ratio": [1e400, "x"]}']


@pytest.mark.parametrize("value", [*HOSTILE, '{"tuple": 5}'])
def test_hostile_answers_are_wrong_answers(value):
    said = f'{{"value": {value}}}'.encode()
    for case in CASES[:2]:
        assert case.fault(said, "the word") == "its answer cannot be read"


def test_integer_too_large_for_a_decimal_is_wrong():
    assert not passes({"call": "f(1)", "expect": 1.5}, 10**4000)
