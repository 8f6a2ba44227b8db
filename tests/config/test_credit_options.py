"""Options of credit from keys of a recipe: errors name the full key, the expected and the actual value."""

from dataclasses import fields

import pytest

from creditflow.config import credit_options
from creditflow.credit.records import ADVANTAGE_ESTIMATORS, PROPAGATION_RULES, CreditOptions
from creditflow.errors import ConfigError, did_you_mean

SHARE = "a number of at least 0 and of at most 1"
WEIGHT = "a number of at least 0 and of at most 1e+100"


def refusal(**keys):
    with pytest.raises(ConfigError) as error:
        credit_options(**keys)
    return str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("propagation", "thresold", "uniform, or FILE.py:NAME"),
        ("propagation", None, "a text or a mapping"),
        ("adv_estimator", "reinforce", "rloo"),
        ("decomp_granularity", "tokens", "token_level"),
        ("group_by", "turn", "task, task_agent,"),
        ("outcome_to", "last", "all, answer"),
        ("gamma", 1.5, SHARE),
        ("gamma", -0.1, SHARE),
        ("gamma", float("nan"), SHARE),
        ("gamma", "0.9", SHARE),
        ("gamma", True, SHARE),
        ("lam", 2, SHARE),
        ("gamma_token", 2, SHARE),
        ("lam_token", 2, SHARE),
        ("reward_decomp", 1, "true or false"),
        ("mask_truncated", "false", "true or false"),
        ("max_version_lag", -1, "a number of at least 0"),
        ("max_version_lag", True, "a whole number"),
        ("shadow", "own", "a mapping of options"),
    ],
)
def test_invalid_value_raises_with_key_expected_and_got(key, value, expected):
    message = refusal(**{key: value})
    assert message.startswith(f"algorithm.{key}: expected ")
    assert expected in message
    assert message.partition(" (did you mean")[0].endswith(f"got {value!r}")
    if key not in ("shadow", "propagation"):
        assert refusal(shadow={key: value}) == message.replace("algorithm.", "algorithm.shadow.", 1)


@pytest.mark.parametrize(
    ("rule", "option", "value", "expected"),
    [
        ("identical", "shared_reward", "both", "one of outcome, outcome_plus_mean_sub_reward"),
        ("calibrated", "score_weight", "w_r", "one of calibrated, fixed"),
        ("threshold", "on_closed_gate", "drop", "one of cut, freeze"),
        ("threshold", "theta", "high", "a number or a mapping of options"),
        ("own", "outcome_to", "last", "one of all, answer"),
        ("own", "w_r", True, WEIGHT),
    ],
)
def test_invalid_option_of_a_rule_raises_with_its_key(rule, option, value, expected):
    message = refusal(propagation={"rule": rule, option: value})
    assert message == f"algorithm.propagation.{option}: expected {expected}, got {value!r}"


@pytest.mark.parametrize("rule", PROPAGATION_RULES.names())
def test_numbers_of_every_rule_have_bounds(rule):
    needed = {"adv_estimator": "relative"} if PROPAGATION_RULES[rule].relative else {}
    numbers = [field for field in fields(PROPAGATION_RULES[rule]) if field.type == "float"]
    assert numbers
    for option in numbers:
        high = option.metadata["le"]
        for value in (-0.1, 1.1 * high, float("inf")):
            expected = SHARE if high == 1.0 else WEIGHT
            message = refusal(propagation={"rule": rule, option.name: value})
            assert message == f"algorithm.propagation.{option.name}: expected {expected}, got {value!r}"
        for value in (0, high):
            made = credit_options(propagation={"rule": rule, option.name: value}, **needed)
            assert getattr(made.propagation, option.name) == value


def test_unknown_option_raises_with_the_nearest():
    message = refusal(propagation={"rule": "own", "w_p": 0.3})
    assert message == "unknown key 'algorithm.propagation.w_p' (did you mean 'algorithm.propagation.w_r'?)"
    message = refusal(propagation={"rule": "own", "theta": 0.3})
    assert message.startswith("algorithm.propagation.theta: the rule own has no such option")
    assert message.endswith("set propagation: threshold")
    assert refusal(gama=1).endswith("algorithm.gama: expected an option of credit (did you mean 'gamma'?)")
    assert "(did you mean 'agent_turn'?)" in refusal(group_by="agent_trn")
    assert did_you_mean("GRPO", ADVANTAGE_ESTIMATORS.names()) == " (did you mean 'grpo'?)"
    message = refusal(propagation={"rule": "threshold", "theta": {"kind": "quantil"}})
    assert message.startswith("algorithm.propagation.theta.kind: expected one of fixed, noise, quantile, tuned")
    assert message.endswith("got 'quantil' (did you mean 'quantile'?)")


def test_option_of_a_rule_among_the_keys_names_the_rules():
    message = refusal(theta=0.3)
    assert message.startswith("algorithm.theta: expected it as an option of a rule, `propagation: {rule: NAME, theta: ")
    assert message.endswith("with threshold")
    assert refusal(shadow={"theta": 0.3}) == message.replace("algorithm.", "algorithm.shadow.", 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"propagation": {"w_r": 1.0}}, "algorithm.propagation: expected .*own.* got None"),
        ({"propagation": None}, "algorithm.propagation: expected .*own.* got None"),
        ({"propagation": PROPAGATION_RULES["own"]}, "algorithm.propagation: expected .*own.* got <class"),
        ({"group_by": "tasks"}, r"algorithm.group_by: expected one of task, .* got 'tasks' \(did you mean 'task'\?\)"),
        (
            {"propagation": {"rule": "own", "outcome_to": "al"}},
            "algorithm.propagation.outcome_to: expected one of all, answer, got 'al'",
        ),
    ],
)
def test_options_of_credit_refuse_other_values(options, message):
    with pytest.raises(ConfigError, match=message):
        CreditOptions(**options)


@pytest.mark.parametrize(
    ("keys", "rule", "options"),
    [
        ({}, "own", {}),
        ({"propagation": "none"}, "own", {}),
        ({"threshold_share": True}, "threshold", {"theta": 0.5}),
        ({"threshold_share": False}, "discounted", {}),
        ({"propagation_threshold": 0.3}, "threshold", {"theta": 0.3}),
        ({"propagation_threshold": {"kind": "quantile"}}, "threshold", {"theta": {"kind": "quantile"}}),
        ({"threshold_share": True, "on_closed_gate": "freeze"}, "threshold", {"on_closed_gate": "freeze"}),
        ({"propagation": "threshold", "threshold_share": True}, "threshold", {}),
        ({"outcome_to": "answer"}, "own", {"outcome_to": "answer"}),
        ({"propagation": {"rule": "own", "w_r": 2}}, "own", {"w_r": 2.0, "w_o": 1.0}),
        ({"propagation": {"rule": "threshold", "theta": 0.3}, "propagation_threshold": 0.3}, "threshold", {}),
    ],
)
def test_flat_keys_choose_the_rule_and_its_options(keys, rule, options):
    made = credit_options(**keys).propagation
    assert made.name == rule
    assert {name: getattr(made, name) for name in options} == options


@pytest.mark.parametrize(
    ("key", "value", "propagation", "message"),
    [
        ("threshold_share", True, "own", "true means propagation 'threshold', but algorithm.propagation is 'own'"),
        ("threshold_share", False, "threshold", "false means propagation 'discounted', but algorithm.propagation is"),
        ("propagation_threshold", 0.3, "own", "the rule own has no such option"),
        (
            "propagation_threshold",
            0.3,
            {"rule": "threshold", "theta": 0.2},
            "0.3, but algorithm.propagation sets theta",
        ),
        ("on_closed_gate", "freeze", "discounted", "the rule discounted has no such option"),
        ("outcome_to", "all", "identical", "the rule identical has no such option"),
    ],
)
def test_flat_key_that_contradicts_the_rule_is_refused(key, value, propagation, message):
    assert refusal(propagation=propagation, **{key: value}).startswith(f"algorithm.{key}: {message}")


@pytest.mark.parametrize("keys", [{"outcome_to": "all"}, {"propagation": {"rule": "own", "outcome_to": "all"}}])
def test_outcome_to_all_beside_a_critic_is_refused(keys):
    assert refusal(adv_estimator="gae", **keys).startswith("algorithm.outcome_to: gae would count an outcome")
    made = credit_options(credit_options(), adv_estimator="gae")
    assert made.propagation.at_answer(made)


def test_shadow_takes_other_options_from_the_first():
    shadow = credit_options(gamma=0.5, shadow={"propagation": {"rule": "threshold", "theta": 0.3}}).shadow
    assert (shadow.propagation.theta, shadow.gamma, shadow.shadow) == (0.3, 0.5, None)
    assert refusal(shadow={"propagaton": "own"}).startswith("algorithm.shadow.propagaton: expected")
    assert refusal(shadow={"propagation": {"rule": "own", "w_r": -1}}).startswith("algorithm.shadow.propagation.w_r: ")
    assert refusal(shadow={"adv_estimator": "gae"}).startswith("algorithm.shadow.adv_estimator: expected an estimator")


def test_shadow_keeps_options_that_both_rules_have():
    own = {"rule": "own", "w_r": 2.0, "sub_reward_origin": 0.0, "outcome_to": "answer"}
    shadow = credit_options(propagation=own, shadow={"propagation": "threshold", "outcome_to": "all"}).shadow
    assert shadow.propagation.spec().items() >= (own | {"rule": "threshold", "outcome_to": "all"}).items()
    assert credit_options(propagation=own, shadow={"propagation": "identical"}).shadow.propagation.w_r == 2.0


@pytest.mark.parametrize("keys", [{"propagation_threshold": 0.5}, {"threshold_share": True}])
def test_flat_keys_choose_the_rule_of_a_shadow(keys):
    shadow = credit_options(propagation={"rule": "own", "w_r": 2.0}, shadow=keys).shadow.propagation
    assert (shadow.name, shadow.theta, shadow.w_r) == ("threshold", 0.5, 2.0)


def test_relative_rule_needs_a_relative_estimator():
    assert "gigpo compares trajectories itself: expected relative, got grpo" in refusal(propagation="gigpo")
    assert "own compares no trajectories: expected gae or grpo" in refusal(adv_estimator="relative")
    assert credit_options(propagation="gigpo", adv_estimator="relative").group_by == "task"


@pytest.mark.parametrize("rule", ["calibrated", "gigpo", "posterior"])
def test_token_scores_need_a_rule_that_pays_tokens(rule):
    needed = {"adv_estimator": "relative"} if rule == "gigpo" else {}
    message = refusal(propagation=rule, decomp_granularity="token_level", **needed)
    assert message.startswith(f"algorithm.decomp_granularity: {rule} gives a step one value: expected step, agent or")
    assert not credit_options(propagation="identical", decomp_granularity="token_level").pays_by_token
