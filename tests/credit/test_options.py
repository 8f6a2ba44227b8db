"""Validation of the options: errors name the key, the expected and the actual value."""

import pytest

from creditflow.credit import CreditOptions, assign
from creditflow.credit.options import choices
from creditflow.credit.records import ADVANTAGE_ESTIMATORS, PROPAGATION_RULES
from creditflow.errors import ConfigError, did_you_mean
from tests.builders import batch_of, make_trajectory, step


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("propagation", "thresold", "identical"),
        ("propagation", None, "threshold"),
        ("adv_estimator", "reinforce", "rloo"),
        ("decomp_granularity", "tokens", "token_level"),
        ("group_by", "turn", "task or task_agent or"),
        ("outcome_to", "last", "auto or all or answer"),
        ("shared_reward", "both", "outcome or outcome_plus_mean_sub_reward"),
        ("on_closed_gate", "drop", "cut or freeze"),
        ("gamma", 1.5, "a number from 0 to 1"),
        ("gamma", -0.1, "a number from 0 to 1"),
        ("gamma", float("nan"), "a number from 0 to 1"),
        ("gamma", "0.9", "a number from 0 to 1"),
        ("gamma", True, "a number from 0 to 1"),
        ("lam", 2, "a number from 0 to 1"),
        ("sub_reward_origin", float("inf"), "a number from 0 to 1"),
        ("w_r", -1.0, "a finite number of at least 0"),
        ("w_o", float("inf"), "a finite number of at least 0"),
        ("reward_decomp", 1, "true or false"),
        ("mask_truncated", "false", "true or false"),
    ],
)
def test_invalid_value_raises_with_key_expected_and_got(key, value, expected):
    chosen = CreditOptions(**{key: value})
    with pytest.raises(ConfigError) as error:
        chosen.validate()
    assert str(error.value).startswith(f"algorithm.{key}: expected ")
    assert expected in str(error.value)
    assert str(error.value).partition(" (did you mean")[0].endswith(f"got {value!r}")


def test_assign_validates_before_it_computes():
    with pytest.raises(ConfigError, match=r"algorithm\.gamma"):
        assign(batch_of(make_trajectory("t", [step()], 1.0)), CreditOptions(gamma=-1.0))


def test_integers_are_accepted_as_numbers():
    CreditOptions(gamma=1, w_r=2, propagation_threshold=0).validate()


@pytest.mark.parametrize(
    ("key", "chosen"),
    [
        ("shadow.adv_estimator", {"shadow": {"adv_estimator": "gae", "outcome_to": "answer"}}),
        ("outcome_to", {"adv_estimator": "gae", "outcome_to": "all"}),
        ("decomp_granularity", {"decomp_granularity": "token_level"}),
        ("score_model", {"propagation": "irc", "adv_estimator": "relative", "score_model": "noisy_and"}),
        ("score_weight", {"propagation": "none", "score_weight": "calibrated", "decomp_granularity": "token_level"}),
        ("max_version_lag", {"max_version_lag": -1}),
        ("max_version_lag", {"max_version_lag": True}),
    ],
)
def test_contradicting_options_raise(key, chosen):
    with pytest.raises(ConfigError, match=rf"algorithm\.{key}: "):
        CreditOptions(**chosen).validate()


def test_gae_with_a_sharing_rule_allows_outcome_to_all():
    CreditOptions(adv_estimator="gae", propagation="identical").validate()


def test_shadow_options_are_validated():
    shadowed = CreditOptions(gamma=0.5, shadow={"propagation": "none"}).shadowed()
    assert (shadowed.propagation, shadowed.gamma, shadowed.shadow) == ("none", 0.5, None)
    with pytest.raises(ConfigError, match=r"algorithm\.shadow\.propagaton: .*did you mean 'propagation'"):
        CreditOptions(shadow={"propagaton": "none"}).validate()
    with pytest.raises(ConfigError, match=r"algorithm\.shadow\.gamma"):
        CreditOptions(shadow={"gamma": 2.0}).validate()
    with pytest.raises(ConfigError, match=r"algorithm\.shadow: expected options such as"):
        CreditOptions(shadow="none").validate()


def test_misspelt_choice_names_the_nearest():
    for key, names in choices().items():
        wrong = names[-1][:1] + names[-1][2:] + "e"
        for options in (CreditOptions(**{key: wrong}), CreditOptions(shadow={key: wrong})):
            with pytest.raises(ConfigError, match=rf"got '{wrong}' \(did you mean '{names[-1]}'\?\)"):
                options.validate()
    assert did_you_mean("treshold", PROPAGATION_RULES.names()) == " (did you mean 'threshold'?)"
    assert did_you_mean("GRPO", ADVANTAGE_ESTIMATORS.names()) == " (did you mean 'grpo'?)"


@pytest.mark.parametrize(
    ("chosen", "entry"),
    [
        ({}, "answer"),
        ({"reward_decomp": False}, "all"),
        ({"w_r": 0}, "all"),
        ({"propagation": "none"}, "all"),
        ({"propagation": "identical"}, "all"),
        ({"propagation": "threshold", "adv_estimator": "gae"}, "answer"),
        ({"propagation": "identical", "adv_estimator": "gae"}, "all"),
        ({"outcome_to": "all"}, "all"),
        ({"propagation": "none", "outcome_to": "answer"}, "answer"),
    ],
)
def test_outcome_enters_where_the_rule_needs_it(chosen, entry):
    assert CreditOptions(**chosen).resolved().outcome_to == entry
