"""The guard without an engine: firing, actions, state, and refused rules."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from creditflow.config import default_rules, load_recipe
from creditflow.credit import make_threshold
from creditflow.engines.common.guard import build_guard
from creditflow.errors import ConfigError
from creditflow.monitoring.catalog import Names, described, matching
from creditflow.monitoring.guard import Guard, engine_action, specs
from tests.builders import credit_options
from tests.monitoring.scenarios import SCENARIOS, Setting, series
from tests.paths import RECIPES

RECIPE = RECIPES / "arithmetic_chain.yaml"


def guard(**rules) -> Guard:
    return Guard(specs(rules))


def of_recipe(*options: str, functions: Sequence[str] = ("outcome",), recipe: Path = RECIPE) -> Guard:
    """The guard of a recipe with one reward function per level, named after the level."""
    loaded = load_recipe(recipe, options)
    rewards = [SimpleNamespace(name=level, level=level) for level in functions]
    return build_guard(loaded.config, loaded.folder, rewards, "local")


def fired(of: Guard, rows):
    return [(e.step, e.rule, e.what) for row in rows for e in of.look(int(row["step"]), row)]


def rows(key: str, *values: float, **more: float):
    return [{"step": i + 1, key: value, **more} for i, value in enumerate(values)]


FALLBACK = {
    "metric": "reward/error_rate",
    "above": 0.1,
    "window": 1,
    "recover": 0.05,
    "recover_epochs": 2,
    "action": "fallback_identical",
}


def test_fallback_lasts_while_the_rule_is_on():
    watched, options = guard(errors=FALLBACK), credit_options(propagation="threshold")
    in_force = []
    for row in rows("reward/error_rate", 0.0, 0.2, 0.2, 0.04, 0.04):
        watched.look(row["step"], row)
        in_force.append(watched.options(options).propagation.name)
    assert in_force == ["threshold", "identical", "identical", "identical", "threshold"]
    assert watched.options(options) is options


HELD = {**FALLBACK, "unless": {"metric": "reward/agreement", "above": 0.5}}


def test_unless_reduces_a_rule_to_a_warning_while_it_holds():
    watched = guard(errors=HELD)
    wrong, agrees = (0.2, 0.2, 0.2, 0.2, 0.0, 0.0), (0.6, 0.2, 0.2, 0.9, 0.9, 0.9)  # means .6, .52, .456
    series_ = [
        {"step": i + 1, "reward/error_rate": rate, "reward/agreement": agreement}
        for i, (rate, agreement) in enumerate(zip(wrong, agrees, strict=True))
    ]
    events, in_force = [], []
    for row in series_:
        events += watched.look(int(row["step"]), row)
        in_force.append(watched.fallback)
        restored = guard(errors=HELD)
        restored.load_state_dict(json.loads(json.dumps(watched.state_dict())))
        assert restored.fallback == watched.fallback
    assert [(e.step, e.what, e.action) for e in events] == [
        (1, "fired", "warn"),
        (3, "fired", "fallback_identical"),
        (6, "recovered", "fallback_identical"),
    ]
    assert in_force == [False, False, True, True, True, False]
    assert events[0].text.endswith("a warning only, while reward/agreement is above 0.5")


def test_unless_keeps_its_mean_in_steps_without_a_value():
    watched = guard(errors=HELD)
    actions = []
    for step, agreement in enumerate((0.55, None, float("nan"), 0.0, None), 1):
        row = {"reward/error_rate": 0.2 if step > 1 else 0.0}
        actions += watched.look(step, row | ({} if agreement is None else {"reward/agreement": agreement}))
        saved = json.loads(json.dumps(watched.state_dict()))
        watched = guard(errors=HELD)
        watched.load_state_dict(saved)
    assert [(e.step, e.action) for e in actions] == [(2, "warn"), (4, "fallback_identical")]


def test_unless_without_a_value_lets_the_rule_act():
    watched = guard(errors=HELD)
    fired(watched, rows("reward/error_rate", 0.2))
    assert watched.fallback


def test_rule_held_by_unless_leaves_checkpoints_good():
    rule = {**HELD, "action": "restore_checkpoint"}
    watched = guard(errors=rule)
    (event,) = watched.look(1, {"reward/error_rate": 0.2, "reward/agreement": 0.55})
    assert (event.action, watched.good) == ("warn", True)
    (event,) = watched.look(2, {"reward/error_rate": 0.2, "reward/agreement": 0.1})
    assert (event.action, watched.good) == ("restore_checkpoint", False)


def test_rule_does_not_fire_during_its_cool_down():
    series = rows("reward/error_rate", 0.2, 0.0, 0.0, 0.2, 0.2, 0.2)
    for cool_down, again in ((0, 4), (1, 5), (2, 6)):
        assert fired(guard(errors={**FALLBACK, "cool_down": cool_down}), series) == [
            (1, "errors", "fired"),
            (3, "errors", "recovered"),
            (again, "errors", "fired"),
        ]


def test_set_threshold_caps_every_kind_permanently():
    watched = guard(
        falls={"metric": "train/pass_at_1", "below": 0.5, "window": 1, "action": "set_threshold", "to": 0.4}
    )
    base = make_threshold({"kind": "fixed", "value": 0.5, "agents": {"a": 0.3, "b": 0.7}})
    assert watched.threshold(base) is base
    fired(watched, rows("train/pass_at_1", 0.4, 0.9, 0.9))
    lowered = watched.threshold(base)
    assert [lowered.theta(agent) for agent in ("a", "b", "c")] == [0.3, 0.4, 0.4]
    assert lowered.metrics() == {
        "propagation/threshold": 0.4,
        "propagation/threshold/a": 0.3,
        "propagation/threshold/b": 0.4,
    }


def test_rule_watches_every_agent_and_policy_separately():
    watched = guard(
        spread={"metric": "reward/sub_reward_var/*", "above": 0.2, "window": 2},
        entropy={"metric": "actor/entropy", "below": 0.1, "window": 1},
    )
    row = {
        "reward/sub_reward_var/a": 0.3,
        "reward/sub_reward_var/b": 0.1,
        "p/actor/entropy": 0.05,
        "actor/entropy": 1.0,
    }
    events = [event for step in (1, 2) for event in watched.look(step, row)]
    assert [(e.step, e.metric) for e in events] == [(1, "p/actor/entropy"), (2, "reward/sub_reward_var/a")]


def test_over_and_unless_read_the_metrics_of_the_same_policy():
    rule = {"metric": "actor/pg_clipfrac", "above": 0.1, "window": 1, "over": "actor/tokens"}
    watched = guard(clipped={**rule, "unless": {"metric": "actor/entropy", "above": 1.0}})
    row = {
        f"{policy}/actor/{name}": value
        for policy, *values in (("a", 0.2, 10_000.0, 0.5), ("b", 0.2, 10_000.0, 2.0), ("c", 0.2, 10.0, 0.5))
        for name, value in zip(("pg_clipfrac", "tokens", "entropy"), values, strict=True)
    }
    held = "a warning only, while actor/entropy is above 1"
    assert [(e.metric[0], e.note) for e in watched.look(1, row)] == [("a", ""), ("b", held)]


def test_absent_and_non_finite_metrics_are_skipped():
    watched = guard(errors=FALLBACK)
    assert watched.look(1, {"reward/error_rate": float("nan")}) == []
    assert watched.look(2, {}) == []
    assert not watched.fallback


def test_non_finite_metric_makes_the_checkpoint_bad() -> None:
    watched = guard(norm={"metric": "actor/grad_norm", "above": 100, "window": 3, "action": "restore_checkpoint"})
    assert watched.look(1, {"actor/grad_norm": float("inf")}) == []
    assert not watched.good


def test_checkpoint_is_good_unless_a_restoring_rule_suspects():
    watched = guard(nan={"metric": "actor/skipped_updates", "above": 0, "window": 3, "action": "restore_checkpoint"})
    good = []
    for row in rows("actor/skipped_updates", 0, 1, 0, 1, 1, 1):
        watched.look(row["step"], row)
        good.append(watched.good)
    assert good == [True, False, True, False, False, False]


@functools.cache
def default_specs():
    return specs(default_rules())


@pytest.mark.parametrize("name", SCENARIOS)
def test_restored_guard_continues_identically(name):
    """Restored twice: the second time from a guard that was itself restored."""
    rows_ = series(name, Setting(), 0)
    uninterrupted, restored = Guard(default_specs()), Guard(default_specs())
    events = []
    for part in (rows_[:3], rows_[3:30], rows_[30:61], rows_[61:]):
        state = json.loads(json.dumps(restored.state_dict()))
        restored = Guard(default_specs())
        restored.load_state_dict(state)
        events += fired(restored, part)
    assert events == fired(uninterrupted, rows_)
    assert (restored.fallback, restored.cap, restored.good) == (
        uninterrupted.fallback,
        uninterrupted.cap,
        uninterrupted.good,
    )


@pytest.mark.parametrize("name", [name for name, scenario in SCENARIOS.items() if scenario.rule])
def test_default_rules_detect_every_fault(name):
    found = fired(Guard(default_specs()), series(name, Setting(n_val=512), 0))
    rule = SCENARIOS[name].rule
    assert [step for step, fired_rule, what in found if fired_rule == rule and what == "fired" and step >= 10]


def test_rules_without_effect_only_warn():
    found = {rule.name: rule for rule in of_recipe("algorithm.propagation=identical").rules}
    assert found["error_rate"].action == found["accuracy"].action == "warn"
    assert "already" in found["error_rate"].note
    assert "pass_rate" not in found
    low = {rule.name: rule for rule in of_recipe("algorithm.propagation_threshold=0.3").rules}
    assert (low["accuracy"].action, low["accuracy"].note) == ("warn", "the threshold is 0.3 already")


def test_fallback_without_an_outcome_only_warns() -> None:
    (rule,) = (rule for rule in of_recipe(functions=["step"]).rules if rule.name == "error_rate")
    assert (rule.action, rule.note) == ("warn", "there is no outcome to fall back to")


def test_fallback_shares_only_the_outcome() -> None:
    watched = guard(errors=FALLBACK)
    fired(watched, rows("reward/error_rate", 0.2))
    shared = credit_options(propagation="identical", shared_reward="outcome_plus_mean_sub_reward")
    assert watched.options(shared) == credit_options(propagation="identical")
    relative = credit_options(propagation="gigpo", adv_estimator="relative", group_by="task")
    assert watched.options(relative) == credit_options(propagation="identical", group_by="task")
    shared_reward = "algorithm.propagation.shared_reward=outcome_plus_mean_sub_reward"
    rules = of_recipe("algorithm.propagation=identical", shared_reward).rules
    assert {rule.action for rule in rules if rule.name == "error_rate"} == {"fallback_identical"}


@pytest.mark.parametrize("metric", ["propagation/pass_rate", "credit/reach/planner"])
def test_metrics_of_credit_are_skipped_during_a_fallback(metric) -> None:
    """Under the shared reward both are 1. No rule recovers by that."""
    own = {"metric": metric, "below": 0.8, "window": 1, "recover_epochs": 1}
    rows_ = [{"reward/error_rate": 0.2, metric: 0.5}] + 3 * [{"reward/error_rate": 0.2, metric: 1.0}]
    numbered = [{"step": step, **row} for step, row in enumerate(rows_, 1)]
    for rules in ({"errors": FALLBACK, "own": own}, {"own": own, "errors": FALLBACK}):
        assert fired(guard(**rules), numbered) == [(1, name, "fired") for name in rules]
    recovers = numbered + 2 * [{"step": 6, "reward/error_rate": 0.0, metric: 1.0}]
    assert fired(guard(errors=FALLBACK, own=own), recovers)[2:] == [(6, "errors", "recovered")]
    alone = guard(own={**own, "action": "fallback_identical", "cool_down": 0})
    assert fired(alone, rows(metric, 0.5, 1.0, 0.5, 1.0)) == [(1, "own", "fired")]
    assert alone.fallback


def test_wide_interval_is_reported_once_and_acts_on_nothing() -> None:
    rule = {"kind": "interval", "metric": "credit/fidelity", "over": "credit/fidelity_high", "below": 0.1, "window": 1}
    watched = guard(low={**rule, "action": "restore_checkpoint"})
    highs = [0.4, 0.4, 0.05, 0.5]
    values = [-0.2, -0.2, -0.2, 0.3]
    events = [
        event
        for step, (value, high) in enumerate(zip(values, highs, strict=True))
        for event in watched.look(step, {"credit/fidelity": value, "credit/fidelity_high": high})
    ]
    assert [(e.step, e.what, e.action) for e in events] == [
        (0, "undecided", "warn"),
        (2, "fired", "restore_checkpoint"),
        (3, "recovered", "restore_checkpoint"),
    ]
    assert "too few samples" in events[0].text
    assert engine_action(events[:1]) is None


def test_default_rule_on_a_missing_metric_is_left_out() -> None:
    loaded = load_recipe(RECIPE)
    rewards = [SimpleNamespace(name="outcome", level="outcome")]
    names = {
        engine: [rule.name for rule in build_guard(loaded.config, loaded.folder, rewards, engine).rules]
        for engine in ("local", "verl")
    }
    assert set(names["local"]) - set(names["verl"]) == {"fidelity_low"}
    changed = load_recipe(RECIPE, ["guard.rules.fidelity_low.below=0.2"])
    with pytest.raises(ConfigError, match="unknown metric 'credit/fidelity'"):
        build_guard(changed.config, changed.folder, rewards, "verl")


def test_stop_precedes_restore_checkpoint() -> None:
    watched = guard(
        back={"metric": "a/b", "above": 0, "window": 1, "action": "restore_checkpoint"},
        stop={"metric": "a/b", "above": 0, "window": 1, "action": "stop"},
    )
    asked = engine_action(watched.look(1, {"a/b": 1.0}))
    assert asked is not None
    assert asked.rule == "stop"


def test_rule_with_a_changed_kind_ignores_its_old_state() -> None:
    before = guard(x={"metric": "val/pass_at_1", "above": 0.5, "window": 1})
    fired(before, rows("val/pass_at_1", 0.9))
    after = guard(x={"metric": "val/pass_at_1", "kind": "drop"})
    after.load_state_dict(before.state_dict())
    assert not after.watches


def test_rules_can_be_changed_removed_and_added(tmp_path):
    (tmp_path / "own.py").write_text(
        "from creditflow.monitoring.guard_rules.base import RuleResult\n"
        "class Even:\n"
        "    def __init__(self, of=2): self.of = of\n"
        "    def look(self, value, over): return RuleResult(value % self.of == 0, False, {'value': value})\n"
        "    def state_dict(self): return {}\n"
        "    def load_state_dict(self, state): pass\n"
        "from dataclasses import dataclass, field\n"
        "@dataclass\n"
        "class Sums(Even):\n"
        "    parts: list[int] = field(default_factory=lambda: [3, 5])\n"
        "    def __post_init__(self): self.of = sum(self.parts)\n"
    )
    (tmp_path / "r.yaml").write_text(f"extends: {RECIPE}\nguard: {{rules: {{entropy: null}}}}\n")
    more = ["guard.rules.mine.kind=own.py:Even", "guard.rules.mine.metric=rollout/tokens", "guard.rules.mine.of=4"]
    found = of_recipe(*more, "guard.rules.error_rate.action=warn", recipe=tmp_path / "r.yaml")
    actions = {rule.name: rule.action for rule in found.rules}
    assert "entropy" not in actions
    assert actions["error_rate"] == "warn"
    assert [e.rule for e in found.look(1, {"rollout/tokens": 8.0})] == ["mine"]
    sums = of_recipe("guard.rules.sums={kind: own.py:Sums, metric: rollout/tokens}", recipe=tmp_path / "r.yaml")
    assert [e.rule for step in (7, 8) for e in sums.look(step, {"rollout/tokens": float(step)})] == ["sums"]


def test_disabled_guard_has_no_events_and_no_metrics():
    off = of_recipe("guard.enable=false")
    assert off.look(1, {"reward/error_rate": 1.0, "reward/judged_trajectories": 1e6}) == []
    assert off.metrics() == {}


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("own.py:Plain", "mine.kind: own.py:Plain: expected a class of options with look, state_dict and .*got Plain"),
        ("own.py:number", "mine.kind: own.py:number: expected a class of options with look, .*got int"),
        ("own.py:Broken", r"mine: own.py:Broken: ValueError: no \(own.py:4 in __init__\)"),
        ("own.py:Needs", "guard.rules.mine.limit: expected a value, which kind own.py:Needs needs, got none"),
    ],
)
def test_kind_that_makes_no_rule_is_refused(tmp_path, kind, says):
    (tmp_path / "own.py").write_text(
        "number = 3\nclass Plain: pass\nclass Broken:\n    def __init__(self): raise ValueError('no')\n"
        "class Needs:\n    def __init__(self, limit): pass\n"
    )
    (tmp_path / "r.yaml").write_text(f"extends: {RECIPE}\n")
    options = f"guard.rules.mine={{kind: '{kind}', metric: rollout/tokens}}"
    with pytest.raises(ConfigError, match=says):
        of_recipe(options, recipe=tmp_path / "r.yaml")


REFUSED = [
    (["guard.rules.entropy.metric=actor/entrpy"], "unknown metric 'actor/entrpy' .*'actor/entropy'"),
    (["guard.rules.pass_rate.metric=propagation/pass_rate/planer"], "did you mean 'propagation/pass_rate/planner'"),
    (["guard.rules.error_rate.over=reward/verdict"], "over: unknown metric 'reward/verdict' .*'reward/verdicts'"),
    (["guard.rules.error_rate.action=fallback"], "action: expected one of .*did you mean 'fallback_identical'"),
    (["guard.rules.accuracy.to=40"], "guard.rules.accuracy.to: expected a number of at least 0 and of at most 1"),
    (["guard.rules.accuracy.action=[warn]"], "guard.rules.accuracy.action: expected one of warn, "),
    (["guard.rules.error_rate.unless={metric: reward/agreemnt, above: 0.5}"], "unless.metric: unknown metric"),
    (["guard.rules.error_rate.unless=3"], "guard.rules.error_rate.unless: expected a mapping of options, got 3"),
    (["guard.rules.error_rate.unless={metric: reward/agreement, above: x}"], "unless.above: expected a number"),
    (["guard.rules.agreement.shortest=11"], "guard.rules.agreement.shortest: expected at most the window, 10, got 11"),
    (["guard.rules.agreement.below=0.8"], "recover: 0.5 lies where the rule fires .below 0.8.: .* at least 0.8"),
    (["guard.rules.error_rate.over=reward/*"], "guard.rules.error_rate.over: expected one metric"),
    (["guard.rules.entropy.widow=3"], "unknown key 'guard.rules.entropy.widow' .*'guard.rules.entropy.window'"),
    (["guard.rules.entropy.actoin=stop"], "unknown key 'guard.rules.entropy.actoin' .*'guard.rules.entropy.action'"),
    (["guard.rules.x={metrc: actor/entropy, below: 1}"], "unknown key 'guard.rules.x.metrc' .*'guard.rules.x.metric'"),
    (["guard.rules.entropy=3"], "guard.rules.entropy: expected metric"),
    (["guard.max_rollbacks=-1"], "guard.max_rollbacks"),
]


@pytest.mark.parametrize(("options", "said"), REFUSED, ids=[" ".join(options) for options, _ in REFUSED])
def test_invalid_rules_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        of_recipe(*options)


NAMES = Names(agents=("planner",), functions=("f",), policies=("a", "b"), rules=("r",))


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("reward/sub_reward_var/planner", True),
        ("reward/sub_reward_var/*", True),
        ("reward/sub_reward_var/verifier", False),
        ("reward/f/latency_s", True),
        ("reward/g/latency_s", False),
        ("a/actor/entropy", True),
        ("*/actor/entropy", True),
        ("c/actor/entropy", False),
        ("a/reward/error_rate", False),
        ("val/pass_at_8", True),
        ("val/pass_at_one", False),
        ("timing/reward_s/f", True),
        ("guard/on/r", True),
    ],
)
def test_catalog_accepts_names_of_the_recipe(name, there):
    assert (described(name, NAMES) is not None) == there


def test_star_matches_one_name():
    there = ["credit/reach/a", "credit/reach/b", "credit/reach", "credit/outcome_reach/a", "x/credit/reach/a"]
    assert matching("credit/reach/*", there) == ["credit/reach/a", "credit/reach/b"]


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("actor/entropy", "entropy"),
        ("a_policy/actor/entropy", "entropy (a_policy)"),
        ("reward/step_error_rate/writer", "wrong steps of writer"),
        ("actor/skipped_updates", "actor/skipped_updates"),  # without a title
    ],
)
def test_titles_fill_in_the_names_of_a_metric(name, title):
    entry = described(name, Names(agents=("writer",), functions=("f",), policies=("a_policy",)))
    assert entry.title_of(name) == title
