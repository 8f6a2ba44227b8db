"""Properties that every propagation rule and every kind of threshold must have."""

import pytest

from creditflow.credit.records import PROPAGATION_RULES
from creditflow.credit.thresholds.base import THRESHOLDS
from tests.credit.rule_checks import check_propagation_rule
from tests.credit.threshold_checks import check_threshold


@pytest.mark.parametrize("name", PROPAGATION_RULES.names())
def test_every_rule_conforms(name: str) -> None:
    record = PROPAGATION_RULES[name]
    dependent = record.relative or record.expects  # it compares trajectories, or is fitted to them
    assert check_propagation_rule(name).not_run == (("trajectories_are_independent",) if dependent else ())


@pytest.mark.parametrize("spec", [0.3, *({"kind": kind} for kind in THRESHOLDS.names())], ids=str)
def test_every_threshold_conforms(spec: float | dict[str, str]) -> None:
    shared = spec == {"kind": "tuned"}  # one theta for all agents
    assert check_threshold(spec).not_run == (("absent_agents_stay",) if shared else ())
