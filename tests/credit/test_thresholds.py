"""Thresholds: updates by their formulas, and equal results with and without a restart."""

import json
from collections import deque
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditflow.credit.rules.threshold import _thetas as thetas
from creditflow.credit.thresholds.base import THRESHOLDS, BatchStats, make_threshold, open_starved, threshold_kind
from creditflow.credit.thresholds.fixed import Fixed
from creditflow.credit.thresholds.quantile import Quantile
from creditflow.errors import ConfigError, UnknownAgentError
from tests.builders import examples
from tests.credit.strategies import registered

KINDS = [
    {"kind": "fixed", "value": 0.4, "agents": {"a": 0.6}},
    {"kind": "tuned", "patience_epochs": 2},
    {"kind": "noise", "range": [0.25, 0.75]},
    {"kind": "quantile"},
    {"kind": "quantile", "range": [0.2, 0.45], "target_pass_rate": 0.6, "initial": 0.21},
]
by_kind = pytest.mark.parametrize("spec", KINDS, ids=lambda spec: f"{spec['kind']}-{len(spec)}")


def saw(sub_rewards=None, spread=None, accuracy=None):
    return BatchStats({a: np.array(r, dtype=float) for a, r in (sub_rewards or {}).items()}, spread or {}, accuracy)


def after(spec, *batches):
    threshold = make_threshold(spec)
    for observed in batches:
        threshold.update(observed)
    return threshold


def restored(threshold, spec):
    copy = make_threshold(spec)
    copy.load_state_dict(json.loads(json.dumps(threshold.state_dict())))
    return copy


def history(seed):
    """Up to eight batches of a few agents, each present or absent, with any number of scored steps."""
    rng = np.random.default_rng(seed)
    batches = []
    for _ in range(rng.integers(9)):
        there = [a for a in "abcd" if rng.random() < 0.7]
        grades = {a: rng.integers(0, 41, rng.choice([0, 1, 5, 40])) / 40 for a in there}
        spread = {a: rng.uniform(0, 0.7) for a in there if rng.random() < 0.8}
        batches.append(saw(grades, spread, rng.choice([None, rng.integers(21) / 20])))
    return batches


few = examples(20)
histories = st.integers(0, 2**32 - 1).map(history)  # drawn as a whole: batch by batch is slow in hypothesis


# --- fixed ---


def test_number_gives_a_fixed_threshold_for_all_agents():
    threshold = after(0.3, saw({"a": [0.1, 0.9]}, {"a": 0.5}, 0.2))
    assert threshold.theta("a") == threshold.theta("never seen") == 0.3
    assert threshold.floor == 0.0
    assert threshold.metrics() == {"propagation/threshold": 0.3}


def test_fixed_threshold_can_differ_by_agent():
    threshold = make_threshold({"kind": "fixed", "value": 0.5, "agents": {"verifier": 0.7}}, ["planner", "verifier"])
    assert thetas(threshold, ["verifier", "planner"]).tolist() == [0.7, 0.5]
    assert threshold.metrics() == {
        "propagation/threshold": 0.5,
        "propagation/threshold/planner": 0.5,
        "propagation/threshold/verifier": 0.7,
    }


def test_fixed_threshold_rejects_agents_outside_the_team():
    with pytest.raises(UnknownAgentError, match=r"theta\.agents: .* got 'verifyer' \(did you mean 'verifier'\?\)"):
        make_threshold({"kind": "fixed", "agents": {"verifyer": 0.7}}, ["planner", "verifier"])
    make_threshold({"kind": "fixed", "agents": {"verifyer": 0.7}})  # the team is unknown


# --- tuned ---


@pytest.mark.parametrize(
    ("accuracies", "theta"),
    [
        ([], 0.5),
        ([0.70, 0.72, 0.67], 0.5),  # exactly 5 points: not more
        ([0.70, 0.72, 0.66], 0.4),
        ([0.72, 0.70, 0.69, 0.68, 0.675, 0.67, 0.66], 0.5),  # a slow fall: 0.72 is no longer remembered
        ([0.72, 0.70, 0.69, 0.68, 0.66], 0.4),
    ],
)
def test_tuned_threshold_falls_after_an_accuracy_drop(accuracies, theta):
    threshold = after({"kind": "tuned"}, *(saw(accuracy=accuracy) for accuracy in accuracies))
    assert threshold.theta("a") == theta
    assert threshold.metrics()["propagation/threshold_lowered"] == (theta == 0.4)


@few
@given(st.lists(st.integers(0, 20), max_size=12), st.integers(1, 4), st.integers(0, 6))
def test_tuned_threshold_equals_a_plain_implementation(points, patience, drop):
    spec = {"kind": "tuned", "patience_epochs": patience, "accuracy_drop": drop / 20, "initial": 0.9, "lower_to": 0.1}
    threshold, last, lowered = make_threshold(spec), deque(maxlen=patience), False
    for point in points:
        threshold.update(saw(accuracy=point / 20))
        lowered |= any(earlier - point > drop for earlier in last)
        last.append(point)
        assert threshold.theta("x") == (0.1 if lowered else 0.9)


# --- noise ---


@pytest.mark.parametrize(("sd", "theta"), [(0.0, 0.7), (0.1, 0.62), (0.25, 0.5), (0.5, 0.3), (0.7, 0.3)])
def test_noise_threshold_falls_with_the_spread(sd, theta):
    assert after({"kind": "noise"}, saw(spread={"a": sd})).theta("a") == pytest.approx(theta)
    last_alone = after({"kind": "noise", "smoothing": 0.0}, saw(spread={"a": 0.4}), saw(spread={"a": sd}))
    assert last_alone.theta("a") == pytest.approx(theta)


def test_noise_threshold_smooths_the_spread():
    threshold = after({"kind": "noise", "smoothing": 0.9}, saw(spread={"a": 0.1}), saw(spread={"a": 0.3}))
    sd = (0.9 * 0.1 * 0.1 + 0.1 * 0.3) / (0.9 * 0.1 + 0.1)
    assert threshold.theta("a") == pytest.approx(0.7 - 0.4 * 2 * sd)
    assert threshold.metrics()["propagation/threshold_spread/a"] == pytest.approx(sd)


# --- quantile ---


def uniform(n):
    """n evenly spaced numbers in (0, 1): the share p is above 1 - p."""
    return (np.arange(n) + 0.5) / n


@pytest.mark.parametrize(("target", "theta"), [(0.7, 0.3), (0.6, 0.4), (0.45, 0.55), (0.3, 0.7)])
def test_quantile_threshold_meets_the_target_pass_rate(target, theta):
    threshold = after({"kind": "quantile", "target_pass_rate": target}, saw({"a": uniform(1000)}))
    assert threshold.theta("a") == pytest.approx(theta, abs=0.005)
    assert threshold.metrics()["propagation/threshold_pass_rate/a"] == pytest.approx(target, abs=0.005)
    assert threshold.metrics()["propagation/threshold_saturated/a"] == 0.0


def test_pass_rate_excludes_steps_at_the_threshold():
    threshold = after({"kind": "quantile", "initial": 0.5}, saw({"a": [0.5] * 20 + [0.5 + 1e-6] * 80}))
    assert threshold.theta("a") == 0.5
    assert threshold.metrics()["propagation/threshold_pass_rate/a"] == 0.8
    assert after({"kind": "quantile", "initial": 0.5}, saw({"a": [0.5 + 1e-10] * 100})).theta("a") < 0.5


def test_quantile_threshold_stays_within_the_dead_band():
    def from_045(points):
        """A threshold at .45 that passes 80 % plus `points`; above .49 it would pass 80 %."""
        return after(
            {"kind": "quantile", "initial": 0.45}, saw({"a": [0.2] * (20 - points) + [0.49] * points + [0.9] * 80})
        )

    assert from_045(1).theta("a") == 0.45
    assert from_045(3).theta("a") == pytest.approx(0.49, abs=0.005)


@pytest.mark.parametrize("n", [16, 1000])
def test_quantile_threshold_is_stable_for_scores_of_few_values(n):
    rng = np.random.default_rng(0)
    threshold, seen = make_threshold({"kind": "quantile"}), []
    for _ in range(200):
        threshold.update(saw({"a": rng.choice([0.0, 0.25, 0.5, 0.75, 1.0], n, p=[0.05, 0.1, 0.35, 0.25, 0.25])}))
        seen.append(threshold.theta("a"))
    assert 0.25 <= seen[-1] < 0.5  # passes .85; from .5 on it would pass .5, with no value in between
    assert len(set(seen[50:])) == 1


@pytest.mark.parametrize("n", [16, 1000])
@pytest.mark.parametrize("seed", range(3))
def test_quantile_threshold_converges_within_5_points(n, seed):
    rng = np.random.default_rng(seed)
    threshold = make_threshold({"kind": "quantile"})
    for low, high in ((0.3, 1.0), (0.0, 1.5)):  # 20 % quantiles: .44, and .3 after clipping at 1
        for _ in range(200):
            threshold.update(saw({"a": np.minimum(rng.uniform(low, high, n), 1.0)}))
        passes = (high - threshold.theta("a")) / (high - low)
        assert abs(passes - 0.8) <= 0.05


def test_quantile_threshold_forgets_the_past_after_a_jump():
    rng = np.random.default_rng(0)
    threshold = make_threshold({"kind": "quantile"})
    for _ in range(300):
        threshold.update(saw({"a": rng.uniform(0.2, 1, 16)}))
    assert threshold.theta("a") == pytest.approx(0.36, abs=0.04)
    for _ in range(40):  # 640 steps, fewer than MEMORY: a running mean would still contain 40 % of the past
        threshold.update(saw({"a": rng.uniform(0.6, 0.8, 16)}))
    assert threshold.theta("a") == pytest.approx(0.64, abs=0.01)


def test_team_estimate_of_equal_thresholds_is_exact():
    for theta in np.linspace(0.3, 0.7, 29):
        for agents in range(1, 12):
            spec = {"kind": "quantile", "initial": float(theta)}
            assert after(spec, saw({str(a): [1.0] for a in range(agents)})).theta("new") == theta


@pytest.mark.parametrize(
    ("scores", "saturated"),
    [
        ([0.0] * 40 + [1.0] * 60, 1.0),  # binary: all thresholds are equivalent, and .6 is not .8
        ([0.0] * 20 + [1.0] * 80, 0.0),  # binary, and on target
        ([1.0] * 100, 1.0),  # all pass, whatever the threshold
        ([0.0] * 100, 1.0),
        (list(0.8 + 0.2 * uniform(100)), 1.0),  # the target is above the range
        (list(0.2 * uniform(100)), 1.0),  # and below it
        ([0.25] * 10 + [0.5] * 20 + [1.0] * 70, 1.0),  # quarters: .9 or .7, with no value in between
        (list(uniform(100) ** 0.5), 0.0),
    ],
)
def test_saturated_metric_reports_an_unreachable_target(scores, saturated):
    threshold = after({"kind": "quantile"}, *[saw({"a": scores})] * 3)
    assert threshold.metrics()["propagation/threshold_saturated/a"] == saturated


def test_quantile_threshold_goes_to_the_nearest_end_of_its_range():
    low = after({"kind": "quantile"}, saw({"a": np.concatenate([0.2 * uniform(50), 0.3 + 0.7 * uniform(50)])}))
    high = after({"kind": "quantile"}, saw({"a": np.concatenate([0.3 + 0.4 * uniform(10), 0.8 + 0.2 * uniform(90)])}))
    assert low.theta("a") == pytest.approx(0.3, abs=0.05)
    assert high.theta("a") == pytest.approx(0.7, abs=0.05)


def test_quantile_threshold_needs_a_minimum_of_steps():
    threshold = after({"kind": "quantile"}, saw({"a": [0.31] * (Quantile.MIN_STEPS - 1)}))
    assert threshold.theta("a") == 0.5
    assert "propagation/threshold_saturated/a" not in threshold.metrics()
    threshold.update(saw({"a": [0.31]}))
    assert threshold.theta("a") < 0.31


def test_only_the_quantile_threshold_has_a_floor():
    assert [make_threshold({"kind": kind}).floor for kind in ("fixed", "tuned", "noise")] == [0.0] * 3
    assert make_threshold({"kind": "quantile"}).floor == 0.1
    assert make_threshold({"kind": "quantile", "floor": 0.25}).floor == 0.25


# --- agents come and go ---


@pytest.mark.parametrize("kind", ["noise", "quantile"])
def test_first_agents_start_at_initial_or_mid_range(kind):
    assert make_threshold({"kind": kind, "range": [0.2, 0.8]}).theta("a") == 0.5
    assert make_threshold({"kind": kind, "initial": 0.6}).theta("a") == 0.6


@pytest.mark.parametrize("kind", ["noise", "quantile"])
def test_new_agent_gets_the_mean_of_known_agents(kind):
    threshold = after({"kind": kind}, saw({"a": uniform(500), "b": 0.5 + uniform(500) / 2}, {"a": 0.5, "b": 0.1}))
    expected = (threshold.theta("a") + threshold.theta("b")) / 2
    assert threshold.theta("a") != threshold.theta("b")
    assert threshold.theta("new") == pytest.approx(expected)
    assert threshold.metrics()["propagation/threshold"] == pytest.approx(expected)


@by_kind
@few
@given(histories, histories)
def test_absent_agent_keeps_its_threshold(spec, before, later):
    without = [saw({k: v for k, v in o.sub_rewards.items() if k != "a"},
                   {k: v for k, v in o.spread.items() if k != "a"}) for o in later]  # fmt: skip
    threshold = after(spec, saw({"a": uniform(40)}, {"a": 0.2}), *before)
    theta = threshold.theta("a")
    for observed in without:
        threshold.update(observed)
        assert threshold.theta("a") == theta


@by_kind
@few
@given(histories, st.permutations("abcd"))
def test_thresholds_do_not_depend_on_names_or_order(spec, before, renamed):
    new = dict(zip("abcd", renamed, strict=True))
    swap = lambda columns: {new[a]: columns[a] for a in sorted(columns, key=new.get)}  # noqa: E731
    spec_of_new = {**spec, "agents": swap(spec["agents"])} if "agents" in spec else spec
    old = after(spec, *before)
    now = after(spec_of_new, *(BatchStats(swap(o.sub_rewards), swap(o.spread), o.accuracy) for o in before))
    assert {new[a]: old.theta(a) for a in "abcd"} == {a: now.theta(a) for a in "abcd"}


# --- every kind ---


@by_kind
@few
@given(histories)
def test_threshold_stays_in_range_with_finite_metrics(spec, batches):
    threshold = make_threshold(spec)
    low, high = spec.get("range", (0.3, 0.7))
    for observed in batches:
        threshold.update(observed)
        theta_A, state = thetas(threshold, "abcdx"), json.dumps(threshold.state_dict())
        assert ((theta_A >= low) & (theta_A <= high)).all()
        assert np.isfinite(list(threshold.metrics().values())).all()
        assert all(name.startswith("propagation/") for name in threshold.metrics())
        threshold.update(BatchStats({}, {}))  # changes nothing, like reading
        assert thetas(threshold, "abcdx").tolist() == theta_A.tolist()
        assert json.dumps(threshold.state_dict()) == state


@by_kind
@few
@given(histories, histories)
def test_restored_threshold_continues_like_the_original(spec, before, later):
    uninterrupted = after(spec, *before)
    resumed = restored(uninterrupted, spec)
    assert resumed.state_dict() == uninterrupted.state_dict()
    for observed in later:
        uninterrupted.update(observed)
        resumed.update(observed)
        assert thetas(resumed, "abcdx").tolist() == thetas(uninterrupted, "abcdx").tolist()
        assert resumed.metrics() == uninterrupted.metrics()
    assert resumed.state_dict() == uninterrupted.state_dict()


@by_kind
def test_saved_state_does_not_change_with_later_updates(spec):
    threshold = after(spec, saw({"a": uniform(40)}, {"a": 0.3}, 0.5))
    state = threshold.state_dict()
    before = json.dumps(state)
    threshold.update(saw({"a": [0.0] * 100, "b": [1.0]}, {"a": 0.1}, 0.1))
    assert json.dumps(state) == before


FULL = saw({"a": uniform(40)}, {"a": 0.3}, 0.5)


def damaged(spec):
    """Damaged versions of a state saved by `spec`, each with a description."""
    state = after(spec, FULL).state_dict()
    yield "another kind", {**state, "kind": "other"}
    yield "no mapping", None
    yield "an unknown key", {**state, "extra": 1}
    for key in state:
        yield f"no {key}", {k: v for k, v in state.items() if k != key}
        if key != "kind":
            yield f"{key} is a number", {**state, key: 3}
    for key, value in state.get("agents", {}).get("a", {}).items():
        entry = state["agents"]["a"]
        yield f"agent without {key}", {**state, "agents": {"a": {k: v for k, v in entry.items() if k != key}}}
        for wrong in (float("nan"), "x", None, -1, [0.5], True):
            if wrong != value:
                yield f"{key}: {wrong}", {**state, "agents": {"a": {**entry, key: wrong}}}


@by_kind
def test_damaged_state_raises_and_changes_nothing(spec):
    threshold = after(spec, FULL, saw({"b": [0.4]}, {"b": 0.1}, 0.45))
    before = threshold.state_dict()
    for what, state in damaged(spec):
        refused = False
        try:
            threshold.load_state_dict(state)
        except ConfigError as error:
            refused = "threshold state" in str(error)
        assert refused, what
        assert threshold.state_dict() == before


def test_quantile_state_of_another_range_raises():
    state = after({"kind": "quantile"}, FULL).state_dict()
    with pytest.raises(ConfigError, match=r"range: expected \[0\.2, 0\.7\], got \[0\.3, 0\.7\]"):
        make_threshold({"kind": "quantile", "range": [0.2, 0.7]}).load_state_dict(state)


def test_custom_kind_is_registered_by_name():
    @threshold_kind("mine")
    class Mine(Fixed):
        def __init__(self, team, *, level):
            super().__init__(team, value=0.0)
            self.level = level

        def theta(self, agent):
            return self.level

    @threshold_kind("half")
    class Half:
        def __init__(self, team):
            self.floor = 0.0

        def theta(self, agent):
            return 0.5

    threshold_kind("bound")(partial(Half))  # a callable without a name
    with registered(THRESHOLDS, "bound", "mine", "half"):
        assert thetas(make_threshold({"kind": "mine", "level": 0.2}, ["a"]), ["a"]).tolist() == [0.2]
        for options, message in (
            ({"kind": "mine"}, "level: expected a value, which kind mine needs"),
            ({"kind": "mine", "levle": 0.2}, r"got 'levle' \(did you mean 'level'\?\)"),
            ({"kind": "half"}, "kind: half: expected a threshold, got Half without update, state_dict"),
            ({"kind": "bound"}, "kind: bound: expected a threshold, got Half without update, state_dict"),
        ):
            with pytest.raises(ConfigError, match=message):
                make_threshold(options)
        for level in (float("nan"), None):
            with pytest.raises(ConfigError, match=rf"finite threshold for agent 'b', got {level}"):
                thetas(make_threshold({"kind": "mine", "level": level}), ["b"])


# --- errors ---


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (None, "expected a finite number, or a mapping with `kind`, got None"),
        ("0.5", "expected a finite number, or a mapping with `kind`, got '0.5'"),
        (True, "expected a finite number, or a mapping with `kind`, got True"),
        (float("nan"), "expected a finite number, or a mapping with `kind`, got nan"),
        ([0.5], "expected a finite number, or a mapping with `kind`"),
        (1e200, ".value: expected a finite number, got 1e+200"),
        ({}, ".kind: expected one of fixed, noise, quantile, tuned, or FILE.py:NAME, got None"),
        ({"kind": "quantil"}, "or FILE.py:NAME, got 'quantil' (did you mean 'quan"),
        ({"kind": ["fixed"]}, ".kind: expected"),
        (
            {"kind": "fixed", "vaule": 1},
            "expected keys of kind fixed: agents, value; got 'vaule' (did you mean 'value'",
        ),
        ({"kind": "fixed", "team": ["a"]}, "expected keys of kind fixed: agents, value; got 'team'"),
        ({"kind": "tuned", "range": [0, 1]}, "expected keys of kind tuned"),
        ({"kind": "quantile", "_tracked": {}}, "expected keys of kind quantile"),
        ({"kind": "fixed", "value": True}, ".value: expected a finite number, got True"),
        ({"kind": "fixed", "agents": {"a": "0.5"}}, ".agents.a: expected a finite number, got '0.5'"),
        ({"kind": "fixed", "agents": ["a"]}, ".agents: expected a mapping by agent, got ['a']"),
        ({"kind": "tuned", "initial": None}, ".initial: expected a finite number, got None"),
        ({"kind": "tuned", "initial": 0.3}, ".lower_to: expected at most initial = 0.3, got 0.4"),
        ({"kind": "tuned", "patience_epochs": 0}, ".patience_epochs: expected a whole number of at least 1, got 0"),
        ({"kind": "tuned", "patience_epochs": True}, ".patience_epochs: expected a whole number"),
        ({"kind": "tuned", "accuracy_drop": 5}, ".accuracy_drop: expected a number from 0 to 1, got 5"),
        ({"kind": "noise", "range": [0.7, 0.3]}, ".range: expected two numbers from 0 to 1, the lower one first"),
        ({"kind": "noise", "range": [0.5, 0.5]}, ".range: expected two numbers from 0 to 1, the lower one first"),
        ({"kind": "noise", "range": [0.3, 1.5]}, ".range: expected two numbers from 0 to 1, the lower one first"),
        ({"kind": "noise", "range": [0.3, float("nan")]}, ".range: expected two numbers from 0 to 1"),
        ({"kind": "noise", "range": "ab"}, ".range: expected two numbers from 0 to 1"),
        ({"kind": "noise", "range": [0.1, 0.2, 0.3]}, ".range: expected two numbers from 0 to 1"),
        ({"kind": "noise", "smoothing": 1.0}, ".smoothing: expected a number from 0 to below 1, got 1.0"),
        ({"kind": "noise", "smoothing": -0.1}, ".smoothing: expected a number from 0 to below 1, got -0.1"),
        ({"kind": "noise", "initial": 0.8}, ".initial: expected a number from 0.3 to 0.7, got 0.8"),
        ({"kind": "quantile", "target_pass_rate": 80}, ".target_pass_rate: expected a number from 0 to 1, got 80"),
        ({"kind": "quantile", "floor": -0.1}, ".floor: expected a number from 0 to 1, got -0.1"),
        ({"kind": "quantile", "initial": 0.1}, ".initial: expected a number from 0.3 to 0.7, got 0.1"),
    ],
)
def test_invalid_threshold_raises_with_key_expected_and_got(spec, message):
    with pytest.raises(ConfigError) as error:
        make_threshold(spec)
    assert str(error.value).startswith("algorithm.propagation.theta")
    assert message in str(error.value)


@pytest.mark.parametrize("spec", [0, -1, 1.5, np.float64(0.5), {"kind": "fixed", "value": 2}])
def test_any_finite_number_is_a_threshold(spec):
    make_threshold(spec)


# --- the floor ---


def starved(gate_open_S, r_S, floor, scored_S=None, agent_S=None):
    n = len(gate_open_S)
    return open_starved(
        np.array(gate_open_S, dtype=bool),
        np.array(r_S, dtype=float),
        np.ones(n, dtype=bool) if scored_S is None else np.array(scored_S, dtype=bool),
        np.zeros(n, dtype=np.int64) if agent_S is None else np.array(agent_S, dtype=np.int64),
        floor,
    ).tolist()


def test_floor_rounds_up_but_not_by_rounding_errors():
    assert sum(starved([0] * 11, [0.1] * 11, 0.1)) == 2
    assert sum(starved([0] * 30, [0.1] * 30, 0.1)) == 3
    assert 0.07 * 100 > 7
    assert sum(starved([0] * 100, [0.1] * 100, 0.07)) == 7


@examples(200)
@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 8).map(lambda k: k / 8), st.booleans(), st.integers(0, 3)), max_size=30
    ),
    st.sampled_from([0.0, 0.1, 0.25, 1 / 3, 0.5, 0.9, 1.0]),
)
def test_floor_equals_a_plain_loop_over_agents(steps, floor):
    expected = [False] * len(steps)
    for agent in {a for *_, a in steps}:
        mine = [s for s, (_, _, scored, a) in enumerate(steps) if a == agent and scored]
        needed = next(k for k in range(len(mine) + 1) if k >= floor * len(mine) - 1e-9)
        closed = sorted((s for s in mine if not steps[s][0]), key=lambda s: -steps[s][1])
        for s in closed[: max(0, needed - sum(steps[s][0] for s in mine))]:
            expected[s] = True
    columns = list(zip(*steps, strict=True)) or [(), (), (), ()]
    assert starved(columns[0], columns[1], floor, columns[2], columns[3]) == expected
