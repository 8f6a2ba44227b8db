"""Tests of reading the answers of workers, which are untrusted."""

import json

import pytest

from creditflow.data import Score
from creditflow.rewards.execution.calls import Returned
from creditflow.rewards.execution.wire import UnreadableAnswerError, pack_returned, unpack_returned
from creditflow.rewards.values import DetailedScore, NotApplicable, taken

GOOD = json.loads(pack_returned(Returned(Score(0.5, reason="half"), seconds=0.1)))


def test_answer_round_trips():
    for returned in (
        Returned(0.5, seconds=0.25),
        Returned((0.5, 1.0)),
        Returned(Score(0.5, range=(0.0, 2.0), reason="half")),
        Returned(DetailedScore(0.5, reason="acc: 1", numbers=(("acc", 1.0),))),
        Returned(NotApplicable()),
        *(Returned(taken(outcomes)) for outcomes in ({"p": 1.0, "e": Score(0.5)}, {1: None, "e": "x"}, {})),
        Returned(error="away", timed_out=True),
        Returned(error="KeyError", traceback="Traceback"),
    ):
        assert unpack_returned(pack_returned(returned)) == returned


@pytest.mark.parametrize(
    "changed",
    [
        {"seconds": 10**400},
        {"seconds": float("nan")},
        {"value": 10**400},
        {"value": [10**400]},
        {"value": {"score": {**GOOD["value"]["score"], "reason": 5}}},
        {"value": {"score": {**GOOD["value"]["score"], "reason": {"other": "x"}}}},
        {"value": {"score": {**GOOD["value"]["score"], "status": [1]}}},
        {"value": {"score": 3}},
        {"value": {**GOOD["value"], "numbers": 3}},
        {"value": {**GOOD["value"], "numbers": ["acc"]}},
        {"value": {}},
    ],
)
def test_malformed_answer_is_unreadable(changed):
    with pytest.raises(UnreadableAnswerError):
        unpack_returned(json.dumps({**GOOD, **changed}))


def test_reason_is_clipped():
    assert len(unpack_returned(json.dumps({**GOOD, "error": "x" * 1_000_000})).error) == 200


def test_numbers_of_an_answer_are_bounded():
    numbers = [[f"{i}/" + "x" * 1_000, i] for i in range(1_000)] + [["nan", None], ["huge", 10**400]]
    answer = {**GOOD, "value": {**GOOD["value"], "numbers": numbers}}
    read = unpack_returned(json.dumps(answer)).value.numbers
    assert len(read) == 50
    assert all(len(name) == 60 and "/" not in name for name, _ in read)
