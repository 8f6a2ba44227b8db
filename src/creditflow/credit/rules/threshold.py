"""`threshold`: credit flows to parents through gates that open above a threshold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, ClassVar, Literal

import numpy as np

from creditflow.credit.records import FORMULA, Credit, RuleInput, option, propagation_rule
from creditflow.credit.rules.base import OutcomeRule
from creditflow.credit.thresholds.base import GATE_TOLERANCE, KEY, Threshold, make_threshold, open_starved
from creditflow.data import Bools, Floats
from creditflow.errors import ConfigError


@propagation_rule("threshold")
@dataclass(frozen=True)
class ThresholdRule(OutcomeRule):
    """`c_t = h_t + w_o * R`: as `discounted`, through gates. See docs/concepts/credit.md.

    `h_t = e_t + gamma * sum over children k of gate_k * h_k / #parents(k)`. `gate_k` is 1 for a sub-reward above the
    threshold and for a step without one, else 0.
    """

    flow: ClassVar[str] = FORMULA
    gated: ClassVar[bool] = True
    why_frozen: ClassVar[str] = "frozen: it lies upstream of a closed gate"
    comparison_rank: ClassVar[int] = 4

    theta: float | Mapping[str, Any] = option(0.5)
    """The threshold. Below 0 all gates are open; from 1 on, those of scored steps are closed. A number, or
    `{kind: fixed | tuned | noise | quantile | file.py:Class, ...}`, see `creditflow.credit.thresholds`."""
    on_closed_gate: Literal["cut", "freeze"] = "cut"
    """The effect of a closed gate. `cut`: no credit passes. `freeze`: also, the steps upstream of the failure do not
    learn from this trajectory."""

    def make_threshold(self, team: tuple[str, ...] | None = None) -> Threshold:
        return make_threshold(self.theta, team)

    def credit(self, inputs: RuleInput) -> Credit:
        rewards, batch, scored_S = inputs.rewards, inputs.batch, inputs.rewards.scored_S & inputs.options.decomposed
        threshold_S = _thetas(inputs.threshold, batch.agent_names)[batch.agent_of_step]
        open_S = ~scored_S | (rewards.sub_reward_S > threshold_S + GATE_TOLERANCE)
        forced_S = np.zeros_like(open_S)
        if (floor := inputs.threshold.floor) > 0:
            counted_S = scored_S & ~rewards.masked_S
            forced_S = open_starved(open_S, rewards.sub_reward_S, counted_S, batch.agent_of_step, floor)
        gate_S = (open_S | forced_S).astype(np.float64)
        credit = self.paid(inputs, gate_S)
        arriving_S = (1.0 - gate_S) * (credit.own_S + credit.received_S)
        return replace(
            credit,
            threshold_S=threshold_S,
            gate_open_S=open_S | forced_S,
            forced_open_S=forced_S,
            withheld_S=np.where(batch.parents_of_step > 0, arriving_S, 0.0),
            frozen_S=_frozen(inputs, gate_S) if self.on_closed_gate == "freeze" else None,
        )


def _thetas(threshold: Threshold, agent_names: Sequence[str]) -> Floats:
    """[A] the threshold in force for each agent. Raises ConfigError if a kind returns no finite number."""
    theta_A = [threshold.theta(agent) for agent in agent_names]
    for agent, theta in zip(agent_names, theta_A, strict=True):
        if not (isinstance(theta, Real) and math.isfinite(theta)):
            raise ConfigError(f"{KEY}: expected a finite threshold for agent {agent!r}, got {theta!r}")
    return np.array(theta_A, dtype=np.float64)


def _frozen(inputs: RuleInput, gate_S: Floats) -> Bools:
    from creditflow.credit import kernels

    return kernels.frozen_upstream(inputs.batch.edge_child, inputs.batch.edge_parent, gate_S)
