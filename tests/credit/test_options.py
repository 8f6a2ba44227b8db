"""What may be chosen, and that a wrong choice is named with what was expected and what came."""

from dataclasses import fields

import pytest

from creditflow.credit import CreditOptions, assign
from creditflow.errors import ConfigError
from tests.builders import batch_of, play, step


def test_the_defaults_are_valid():
    CreditOptions().validate()


def test_every_option_is_a_plain_string_number_or_boolean_of_its_declared_type():
    declared = {"str": str, "float": float, "bool": bool}
    for option in fields(CreditOptions):
        assert type(getattr(CreditOptions(), option.name)) is declared[option.type]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("propagation", "thresold", "identical"),
        ("propagation", None, "threshold"),
        ("adv_estimator", "rloo", "grpo"),
        ("group_by", "turn", "task or task_agent or"),
        ("outcome_to", "last", "all or answer"),
        ("shared_reward", "both", "outcome or outcome_plus_mean_sub_reward"),
        ("gate_unscored", "ajar", "open or closed"),
        ("gate", "soft", "hard"),
        ("gate_at", "receive", "pass"),
        ("share", "copy", "split"),
        ("on_closed_gate", "freeze", "cut"),
        ("gamma", 1.5, "a number from 0 to 1"),
        ("gamma", -0.1, "a number from 0 to 1"),
        ("gamma", float("nan"), "a number from 0 to 1"),
        ("gamma", "0.9", "a number from 0 to 1"),
        ("gamma", True, "a number from 0 to 1"),
        ("lam", 2, "a number from 0 to 1"),
        ("sub_reward_origin", float("inf"), "a number from 0 to 1"),
        ("propagation_threshold", float("nan"), "a finite number"),
        ("propagation_threshold", None, "a finite number"),
        ("w_r", -1.0, "a finite number of at least 0"),
        ("w_o", float("inf"), "a finite number of at least 0"),
        ("reward_decomp", 1, "true or false"),
        ("mask_truncated", "false", "true or false"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_with_key_expected_and_got(key, value, expected):
    chosen = CreditOptions(**{key: value})
    with pytest.raises(ConfigError) as error:
        chosen.validate()
    assert str(error.value).startswith(f"algorithm.{key}: expected ")
    assert expected in str(error.value)
    assert str(error.value).endswith(f"got {value!r}")


def test_assign_validates_before_it_computes():
    with pytest.raises(ConfigError, match=r"algorithm\.gamma"):
        assign(batch_of(play("t", [step()], 1.0)), CreditOptions(gamma=-1.0))


def test_whole_numbers_are_numbers():
    CreditOptions(gamma=1, w_r=2, propagation_threshold=0).validate()
