"""Tests of references to files in options of credit, and of their recorded properties."""

from dataclasses import replace

import numpy as np
import pytest

from creditflow import TrajectoryBatch, assign
from creditflow.config.references import recall_properties, recorded_properties
from creditflow.credit import CreditOptions, explain, make_threshold
from creditflow.credit.records import NOTHING, PROPAGATION_RULES
from creditflow.credit.thresholds.base import THRESHOLDS
from creditflow.errors import ConfigError

RULE = {"flow": NOTHING, "pays_scores": True, "options": ["decay"]}


def batch() -> TrajectoryBatch:
    return TrajectoryBatch.from_arrays(
        trajectory_of_step=np.array([0, 1]), group_of_trajectory=np.array([0, 0]), outcome=np.array([1.0, 0.0])
    )


def test_recorded_rule_is_explained_and_assigns_nothing() -> None:
    recall_properties({"algorithm.propagation": {"/a.py:rule": RULE}})
    options = CreditOptions(propagation={"rule": "/a.py:rule", "decay": 0.5})
    assert options.propagation.pays_scores
    assert options.propagation.spec() == {"rule": "/a.py:rule", "decay": 0.5}
    assigned = replace(assign(batch(), CreditOptions()), options=options)
    assert explain(assigned, 0).replay() == assigned.advantage.advantage_S[0]
    with pytest.raises(ConfigError, match=r"algorithm\.propagation: /a\.py:rule: its file is not loaded"):
        assign(batch(), options)


def test_recorded_formulas_are_shown_if_they_are_arithmetic() -> None:
    hostile = ("__import__('os')", "(1).real", "9 ** 9 ** 9", "'a' * 9", "1 +", "1" * 201)
    formulas = {"shared": [*hostile, "w_o * (outcome + 0)"]}
    recall_properties({"algorithm.propagation": {"/f.py:rule": RULE | {"options": ["w_o"], "formulas": formulas}}})
    options = CreditOptions(propagation={"rule": "/f.py:rule", "w_o": 1.0})

    assert options.propagation.formulas(options) == {"shared": ("w_o * (outcome + 0)",)}
    assert "shared = w_o * (outcome + 0) = 1" in str(
        explain(replace(assign(batch(), CreditOptions()), options=options), 0)
    )


def test_loaded_rule_takes_precedence_over_a_recorded_one() -> None:
    rule = PROPAGATION_RULES["own"]
    PROPAGATION_RULES.load("/b.py:rule", rule)
    recall_properties({"algorithm.propagation": {"/b.py:rule": RULE}})
    assert PROPAGATION_RULES["/b.py:rule"] is rule


def test_properties_survive_a_round_trip() -> None:
    theirs = type("Theirs", (PROPAGATION_RULES["threshold"],), {"name": "/c.py:rule"})
    PROPAGATION_RULES.load("/c.py:rule", theirs)
    recorded = recorded_properties(CreditOptions(propagation="/c.py:rule"))
    moved = {key: {"/d.py:rule": properties["/c.py:rule"]} for key, properties in recorded.items()}
    recall_properties(moved)
    assert recorded_properties(CreditOptions(propagation="/d.py:rule")) == moved


def test_recorded_threshold_has_any_keys_and_no_theta() -> None:
    recall_properties({THRESHOLDS.key: {"/a.py:Kind": {}}})
    threshold = make_threshold({"kind": "/a.py:Kind", "level": 1})
    with pytest.raises(ConfigError, match=r"theta\.kind: /a\.py:Kind: its file is not loaded"):
        threshold.theta("a")


@pytest.mark.parametrize(
    "wrong",
    [
        3,
        {"algorithm.propagation": 3},
        {"algorithm.propagation": {"/e.py:x": 3}},
        *({"algorithm.propagation": {"/e.py:x": RULE | part}} for part in ({"flow": "up"}, {"gated": "no"})),
        *({"algorithm.propagation": {"/e.py:x": {"options": options}}} for options in (3, [3], ["spec"], ["class"])),
    ],
)
def test_properties_of_another_form_are_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match="recorded properties"):
        recall_properties(wrong)


def test_recorded_name_without_a_file_is_left_out() -> None:
    recall_properties({"algorithm.propagation": {"free": RULE}})
    assert "free" not in PROPAGATION_RULES
