"""Tests of arguments of ready-made functions: a wrong one is refused when the recipe is loaded."""

import math

import pytest

from creditflow.errors import RewardError
from tests.rewards.trajectories import load

WRONG: dict[str, list[tuple[dict, str]]] = {
    "creditflow.rewards.builtin.code:CodeTests": [
        ({"only": []}, "list of indices"),
        ({"only": [-1]}, "list of indices"),
        ({"only": "12"}, "list of indices"),
        ({"max_tests": 0}, "max_tests"),
        ({"total_seconds": 0}, "total_seconds"),
        ({"seconds": 0}, "wall_s"),
        ({"sandbox": {"backend": "bublewrap"}}, "bubblewrap"),
        ({"sandbox": {"memory": 5}}, "memory_mb"),
        ({"sandbox": {"memory_mb": -5}}, "memory_mb"),
        ({"second": 5}, "seconds"),
    ],
    "coherence": [
        ({"numbers": -1.0}, "numbers to be a weight of 0 or more, got -1"),
        ({"overlap": math.nan}, "overlap to be a weight"),
        ({"repetition": 0, "numbers": 0, "overlap": 0}, "a weight of more than 0"),
        ({"n": 0}, "1 to 20 words, got n=0"),
        ({"number": 1.0}, "did you mean 'numbers'"),
    ],
    "format": [
        ({}, "either a pattern or a schema"),
        ({"pattern": "a", "schema": {}}, "either a pattern or a schema"),
        ({"pattern": "a("}, "not a regular expression"),
        ({"pattern": "a", "where": "fence"}, "where to be all, start, end, anywhere, got 'fence'"),
        ({"schema": {}, "where": "fense"}, r"did you mean 'fence'\?"),
        ({"schema": {"type": "strin"}}, r"wrong at \$.type"),
        ({"schema": {"$ref": "#/$defs/nothing"}}, "leads nowhere"),
        ({"schema": {"$schema": "http://json-schema.org/draft-07/schema#"}}, "Draft 2020-12"),
        ({"schema": "object"}, "as a mapping"),
        ({"patern": "a"}, r"did you mean 'pattern'\?"),
    ],
    "creditflow.rewards.builtin.kl:KlToReference": [
        ({"estimator": "k3"}, "estimator: expected one of kl, abs, mse, low_var_kl, got 'k3'"),
        ({"per": "line"}, "per: expected token or step, got 'line'"),
        ({"limit": 0}, "limit: expected a number above 0 and of at most 1000, got 0"),
        ({"limit": math.nan}, "limit: expected a number above 0 and of at most 1000, got nan"),
    ],
    "overlong": [
        ({"max_length": 0, "cache_length": 0}, "max_length of 1 token or more, got 0"),
        ({"max_length": 8, "cache_length": 9}, "cache_length of 0 to max_length=8 tokens, got 9"),
        ({"max_length": 8, "cache_length": -1}, "cache_length of 0 to max_length=8 tokens, got -1"),
        ({"max_length": 8}, "missing a required argument"),
    ],
}


@pytest.mark.parametrize(("fn", "args", "message"), [(fn, *row) for fn, rows in WRONG.items() for row in rows])
def test_wrong_argument_is_refused_at_load(fn, args, message):
    with pytest.raises(RewardError, match=message):
        load(fn, args=args)
