"""Tests of reading the answers of workers, which are untrusted."""

import json

import pytest

from creditflow.data import Score
from creditflow.rewards.calls import PlacedScore, Returned
from creditflow.rewards.execution.wire import UnreadableAnswerError, pack_returned, unpack_returned

SCORE = Score(0.5, range=(0.0, 2.0), reason="half\n")
GOOD = json.loads(pack_returned(Returned((PlacedScore(SCORE, numbers=(("acc", 1.0),)),), seconds=0.1)))


@pytest.mark.parametrize(
    "returned",
    [
        Returned((PlacedScore(SCORE, 3, (("acc", 1.0),)), PlacedScore(Score((0.5, 1.0)), "planner"))),
        Returned(),
        Returned(error="away", seconds=0.25, timed_out=True),
        Returned(error="KeyError", traceback="Traceback"),
    ],
)
def test_answer_round_trips_in_one_line(returned: Returned) -> None:
    packed = pack_returned(returned)
    assert b"\n" not in packed
    assert unpack_returned(packed) == returned


def test_answer_of_other_types_is_unreadable() -> None:
    placed = GOOD["scores"][0]
    scores = [
        3,
        [3],
        [{**placed, "numbers": ["acc"]}],
        [{**placed, "numbers": [["acc", float("nan")]]}],
        *([{**placed, "score": {**placed["score"], key: value}}] for key, value in (
            ("value", float("nan")), ("value", [10**400]), ("value", None), ("value", "0.5"), ("range", [0.0]),
            ("reason", 5), ("status", [1]), ("status", "fine"),
        )),
    ]  # fmt: skip
    for changed in (*({"scores": value} for value in scores), {"seconds": 10**400}, {"seconds": float("inf")}):
        with pytest.raises(UnreadableAnswerError):
            unpack_returned(json.dumps({**GOOD, **changed}).encode())
