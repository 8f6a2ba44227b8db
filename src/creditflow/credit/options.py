"""The options of credit assignment: what may be chosen, and what is refused.

Knows the names of `algorithm.*` and their limits; not how a recipe is read, nor how credit is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

from creditflow.credit.advantage import ADVANTAGE_ESTIMATORS
from creditflow.credit.gates import GATES, GATES_OF_UNSCORED
from creditflow.credit.groups import LEVELS
from creditflow.credit.propagate import OUTCOME_TO, PROPAGATION_RULES, SHARED_REWARDS
from creditflow.errors import ConfigError


@dataclass
class CreditOptions:
    """The keys of `algorithm.*` that decide credit; plain types, so that it can be the base of a structured config."""

    reward_decomp: bool = True
    """False: outcome only. No sub-reward enters credit, and no gate closes."""
    propagation: str = "threshold"
    """How rewards become credit: `identical`, `uniform`, `none`, `discounted`, `threshold`, or a registered rule."""
    propagation_threshold: float = 0.5
    """theta: a gate is open where the sub-reward is above it. Below 0 all are open, from 1 on scored ones closed."""
    adv_estimator: str = "grpo"
    """How credit becomes advantage: `grpo`, or a registered estimator."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide by the group's spread, as GRPO does; false: Dr. GRPO (arXiv 2503.20783)."""
    group_by: str = "agent_turn"
    """Which steps share a baseline: `task`, `task_agent`, `task_agent_turn`, `task_agent_state` (the same prompt), or,
    across the batch, `agent`, `agent_turn`."""
    gamma: float = 0.99
    """Discount per step of propagation, from 0 to 1."""
    lam: float = 0.95
    """lambda of GAE, from 0 to 1, for estimators with a critic; `grpo` has none and does not read it."""
    outcome_to: str = "all"
    """`all`: the outcome is added to every step's credit, neither discounted nor gated. `answer`: to the own reward of
    the steps that the answer came from, and flows upstream from there."""
    sub_reward_origin: float = 1.0
    """b in `w_r * (r - b)`, from 0 to 1. 1 charges for wrong steps; 0 pays for right ones, needless ones included."""
    w_r: float = 1.0
    """Weight of sub-rewards, at least 0."""
    w_o: float = 1.0
    """Weight of the outcome beside sub-rewards, at least 0."""
    shared_reward: str = "outcome"
    """What `identical` and `uniform` hand out: `outcome`, or `outcome_plus_mean_sub_reward`, which gives shared credit
    the same information as the other rules have."""
    gate: str = "hard"
    """`hard`: open or closed, nothing between."""
    gate_at: str = "pass"
    """`pass`: a step hands credit to its parents only if it is open itself."""
    gate_unscored: str = "open"
    """Where the gate of a step stands whose scoring failed: `open` or `closed`."""
    share: str = "split"
    """`split`: a step divides what it hands up evenly among its parents."""
    on_closed_gate: str = "cut"
    """`cut`: nothing arrives from behind a closed gate."""
    mask_truncated: bool = False
    """Leave truncated trajectories out of training."""

    def validate(self) -> None:
        """Raises ConfigError with the key, what was expected and what came."""
        for key, choices in _CHOICES.items():
            value, names = getattr(self, key), choices()
            _expect(isinstance(value, str) and value in names, key, " or ".join(names), value)
        for key in _BOOLS:
            value = getattr(self, key)
            _expect(isinstance(value, bool), key, "true or false", value)
        for key, (low, high, words) in _NUMBERS.items():
            value = getattr(self, key)
            _expect(_is_number(value) and low <= value <= high, key, words, value)


_BOOLS = ("reward_decomp", "norm_adv_by_std_in_grpo", "mask_truncated")
_LARGEST = 1e100
"""Larger weights and thresholds are typing errors, and would overflow in the variance."""
_UNIT = (0.0, 1.0, "a number from 0 to 1")
_WEIGHT = (0.0, _LARGEST, "a finite number of at least 0")
_NUMBERS: dict[str, tuple[float, float, str]] = {
    "propagation_threshold": (-_LARGEST, _LARGEST, "a finite number"),
    "gamma": _UNIT,
    "lam": _UNIT,
    "sub_reward_origin": _UNIT,
    "w_r": _WEIGHT,
    "w_o": _WEIGHT,
}
# Functions, because rules may be registered at any time.
_CHOICES: dict[str, Callable[[], tuple[str, ...]]] = {
    "propagation": PROPAGATION_RULES.names,
    "adv_estimator": ADVANTAGE_ESTIMATORS.names,
    "group_by": lambda: tuple(LEVELS),
    "outcome_to": lambda: tuple(OUTCOME_TO),
    "shared_reward": lambda: tuple(SHARED_REWARDS),
    "gate": lambda: tuple(GATES),
    "gate_at": lambda: ("pass",),
    "gate_unscored": lambda: tuple(GATES_OF_UNSCORED),
    "share": lambda: ("split",),
    "on_closed_gate": lambda: ("cut",),
}


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _expect(holds: bool, key: str, expected: str, value: object) -> None:
    if not holds:
        raise ConfigError(f"algorithm.{key}: expected {expected}, got {value!r}")
