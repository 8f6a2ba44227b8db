"""Each kind of rule, against values computed by hand and against chance."""

import json
import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditflow.errors import ConfigError
from creditflow.monitoring.guard import specs
from creditflow.monitoring.guard_rules.base import GUARD_RULES
from creditflow.monitoring.guard_rules.drop import Drop
from creditflow.monitoring.guard_rules.interval import Interval
from creditflow.monitoring.guard_rules.level import Level
from tests.builders import examples


def looks(rule, values, over=None):
    return [rule.look(value, over) for value in values]


def bad(rule, values, over=None):
    return [found.bad for found in looks(rule, values, over)]


def test_level_without_counts_needs_every_value_of_the_window():
    assert bad(Level(above=1.0, window=3), [2, 2, 2]) == [False, False, True]
    assert bad(Level(above=1.0, window=3), [2, 0.5, 2, 2, 2]) == [False] * 4 + [True]
    assert bad(Level(below=1.0, window=2), [0.5, 0.5, 1.0]) == [False, True, False]


def test_level_of_a_share_ignores_chance_deviations():
    # 12 of 100 against a limit of .1: z = .02 / sqrt(.1 * .9 / 100) = .67, p = .25.
    found = Level(above=0.1, window=1).look(0.12, 100)
    assert not found.bad
    assert found.numbers["p"] == pytest.approx(1 - NormalDist().cdf(0.02 / math.sqrt(0.09 / 100)))
    assert found.numbers["p"] == pytest.approx(0.2525, abs=1e-4)
    # 1,200 of 10,000: z = 6.7.
    assert Level(above=0.1, window=1).look(0.12, 10_000).bad


def test_level_pools_shares_by_their_counts():
    rule = Level(above=0.1, window=2)
    rule.look(0.2, 900)
    found = rule.look(0.1, 100)
    assert found.numbers["mean"] == pytest.approx(0.19)
    assert found.numbers["over"] == 1000


def test_level_widens_its_error_for_scattered_shares():
    even, scattered = Level(above=0.1, window=4), Level(above=0.1, window=4)
    looks(even, [0.2] * 4, 1000)
    looks(scattered, [0.0, 0.4, 0.0, 0.4], 1000)
    assert even.look(0.2, 1000).numbers["p"] < 1e-9
    assert not scattered.look(0.0, 1000).bad


def test_level_fires_on_a_share_that_falls_toward_its_limit() -> None:
    """Errors that contradict right trajectories fall in this way, since training on them makes right ones rarer."""
    falling = [0.0] * 8 + [0.42, 0.35, 0.28, 0.21, 0.14, 0.07]
    found = bad(Level(above=0.1, window=5, p_value=1e-3), falling, 128)
    assert found.index(True) in (9, 10, 11)
    assert not found[-1]  # the value is below the limit again


def test_level_rarely_fires_on_scattered_shares() -> None:
    """The shares of 128 scatter around the limit three times as much as their counts explain."""
    rng = np.random.default_rng(0)
    fired = 0
    for _ in range(300):
        shares = rng.binomial(128, rng.beta(1.2, 13.8, 40)) / 128
        fired += any(bad(Level(above=0.1, window=5, p_value=1e-3), shares.tolist(), 128))
    assert fired / 300 < 0.03


def test_shortest_lets_the_newest_values_decide() -> None:
    series_ = [0.9, 0.85, 0.92, 0.88, 0.9, 0.87, 0.91, 0.9, 0.1, 0.12]
    found = bad(Level(below=0.4, window=10, shortest=2), series_, 60)
    assert found == [False] * 9 + [True]
    assert not any(bad(Level(below=0.4, window=10), series_, 60))


def test_shortest_waits_for_counts_and_reports_the_width() -> None:
    rule = Level(below=0.4, window=10, shortest=2)
    found = looks(rule, [0.15] * 10, 8)
    first = [one.bad for one in found].index(True)
    assert first > 2
    assert found[first].numbers["window"] == first + 1
    expected = 1 - NormalDist().cdf(0.25 / math.sqrt(0.24 / (8 * (first + 1))))
    assert found[first].numbers["p"] == pytest.approx(expected)
    assert expected < 1e-4 / 9


def test_shortest_divides_the_p_value_among_widths() -> None:
    rng = np.random.default_rng(0)
    fired = sum(
        any(bad(Level(below=0.4, window=10, shortest=2, p_value=1e-2), (rng.binomial(60, 0.4, 40) / 60).tolist(), 60))
        for _ in range(200)
    )
    assert fired / 200 < 0.2  # 40 looks at 1 % each, mostly on the same values


def test_times_first_scales_the_limit_by_the_first_value():
    rule = Level(below=0.1, times_first=True, window=1)
    assert bad(rule, [-1.0, 0.0, 2.0, 0.3, 0.19]) == [False, False, False, False, True]
    assert bad(Level(above=2.0, times_first=True, window=1), [0.0, 1.0, 1.9, 2.1]) == [False, False, False, True]


def test_level_recovers_after_recover_epochs_values():
    rule = Level(above=0.1, window=1, recover=0.05, recover_epochs=2)
    found = looks(rule, [0.2, 0.07, 0.04, 0.04])
    assert [f.well for f in found] == [False, False, False, True]


def test_interval_needs_every_end_of_the_window() -> None:
    rule = Interval(below=0.1, window=2)
    ends = [0.05, 0.2, 0.05, 0.05]
    found = [rule.look(-0.1, end) for end in ends]
    assert [one.bad for one in found] == [False, False, False, True]
    assert [one.undecided for one in found] == [False, True, False, False]
    assert all(one.suspect for one in found)


def test_interval_above_mirrors_interval_below() -> None:
    below, above = Interval(below=-0.5, window=1), Interval(above=0.5, window=1)
    for value, end in ((-0.6, -0.55), (-0.6, -0.4), (-0.4, -0.3)):
        one, other = below.look(value, end), above.look(-value, -end)
        assert (one.bad, one.well, one.undecided) == (other.bad, other.well, other.undecided)


def test_interval_without_an_end_is_undecided() -> None:
    found = Interval(below=0.1, window=1).look(0.0, None)
    assert (found.bad, found.well, found.undecided) == (False, False, True)


def test_interval_recovers_by_the_estimate() -> None:
    rule = Interval(below=0.1, recover=0.2)
    assert [rule.look(value, 0.5).well for value in (0.15, 0.2)] == [False, True]


def test_interval_false_positives_respect_the_window() -> None:
    rng, fired_ = np.random.default_rng(0), 0
    for _ in range(20_000):
        rule = Interval(below=0.1, window=1)
        value = 0.1 + rng.normal(0, 0.2)
        fired_ += rule.look(value, value + 1.96 * 0.2).bad
    assert 0.02 < fired_ / 20_000 < 0.03


@pytest.mark.parametrize(
    ("values", "n", "fires"),
    [
        ([0.7, 0.68, 0.69, 0.64, 0.62, 0.60], 1000, True),
        ([0.7, 0.68, 0.69, 0.64, 0.62, 0.60], 30, False),  # a fall by chance
        ([0.9, 0.5, 0.8, 0.6, 0.7, 0.5], 10**9, False),
    ],
)
def test_drop_tests_the_fall_of_the_least_squares_line(values, n, fires):
    """The error is that of the counts, or of the scatter around the line if that is larger."""
    found = looks(Drop(by=0.05, window=5), values, n)[-1]
    x = np.arange(6)
    line = np.polyfit(x, values, 1)
    assert found.numbers["fall"] == pytest.approx(-5 * line[0])
    squares = (np.array(values) - np.polyval(line, x)) ** 2
    variance = max(np.mean([p * (1 - p) / n for p in values]), squares.sum() / (6 - 2))  # two parameters of the line
    assert found.numbers["standard_error"] == pytest.approx(5 * math.sqrt(variance / 17.5))
    assert found.bad == fires


def test_drop_waits_for_a_full_window():
    assert bad(Drop(window=5), [0.9, 0.1, 0.1, 0.1, 0.1], 1000) == [False] * 5


@pytest.mark.parametrize("share", [0.02, 0.1])
def test_level_false_positives_respect_the_p_value(share):
    rng, fired, runs = np.random.default_rng(0), 0, 8000
    for _ in range(runs):
        fired += Level(above=0.1, window=1, p_value=0.01).look(rng.binomial(500, share) / 500, 500).bad
    assert fired / runs < 0.016  # a discrete share, approximated by the normal


def test_drop_false_positives_respect_the_p_value():
    rng, fired, runs = np.random.default_rng(0), 0, 4000
    for _ in range(runs):
        fired += bad(Drop(by=0.001, window=5, p_value=0.01), rng.binomial(500, 0.6, 6) / 500, 500)[-1]
    assert fired / runs < 0.015


@examples(50)
@given(
    st.sampled_from(
        [
            ("level", {"above": 0.2}),
            ("level", {"below": 0.5, "times_first": True}),
            ("drop", {}),
            ("interval", {"below": 0.4}),
        ]
    ),
    st.lists(st.floats(0, 1), min_size=1, max_size=20),
    st.integers(0, 20),
)
def test_restored_rule_continues_identically(made, values, cut):
    name, options = made
    through, first, second = (GUARD_RULES[name](**options) for _ in range(3))
    expected = looks(through, values, 100)
    before = looks(first, values[:cut], 100)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before + looks(second, values[cut:], 100) == expected


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("level", {}, "above, below: expected one of them"),
        ("level", {"above": 1.0, "below": 0.0}, "above, below: expected one of them"),
        ("level", {"above": 1.0, "times_first": "no"}, "mine.times_first: expected true or false, got 'no'"),
        ("drop", {"window": 2}, "mine.window: expected a number of at least 3, got 2"),
        ("level", {"above": 0.1, "recover": 0.12}, "mine.recover: 0.12 lies where the rule fires"),
        ("level", {"below": 0.8, "recover": 0.7}, "mine.recover: 0.7 lies where the rule fires"),
        ("interval", {}, "above, below: expected one of them"),
        ("interval", {"below": 0.1, "recover": 0.05}, "mine.recover: 0.05 lies where the rule fires"),
        ("interval", {"below": 0.1, "window": 0}, "mine.window: expected a number of at least 1"),
        ("level", {"above": math.nan}, "mine.above: expected a finite number, got nan"),
        ("level", {"above": 0.1, "window": 0.5}, "mine.window: expected a whole number of at least 1"),
        ("level", {"above": 0.1, "p_value": 2}, "mine.p_value: expected a number above 0 and below 1, got 2"),
        ("drop", {"by": 0.05, "recover": 0.06}, "mine.recover: 0.06 lies where the rule fires"),
        ("drop", {"by": -0.1}, "mine.by: expected a number above 0, got -0.1"),
    ],
)
def test_invalid_options_are_refused(kind, options, said):
    with pytest.raises(ConfigError, match=said):
        specs({"mine": {"kind": kind, "metric": "reward/error_rate", **options}})
