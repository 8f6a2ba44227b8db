"""Gates: whether credit may leave a step for its parents, or enter it from its children.

A gate looks at a step's own sub-reward and its threshold. It does not know where the threshold comes from, nor what
flows through it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from creditflow.trajectory import Bools, Floats

GATE_TOLERANCE = 1e-9
"""A sub-reward that equals its threshold but for rounding (a mean of thirds, say) must not pass it."""


def is_above(sub_reward_S: Floats, threshold_S: Floats) -> Bools:
    """[S] whether `r > theta + 1e-9`. NaN sub-rewards count as not above."""
    return np.greater(sub_reward_S, threshold_S + GATE_TOLERANCE)


def hard_gate(sub_reward_S: Floats, threshold_S: Floats, tau: float) -> Floats:
    """[S] 1 where the sub-reward is above the threshold, else 0; `tau` plays no part."""
    return is_above(sub_reward_S, threshold_S).astype(np.float64)


def soft_gate(sub_reward_S: Floats, threshold_S: Floats, tau: float) -> Floats:
    """[S] `sigmoid((r - theta) / tau)`: 1/2 at the threshold, and never quite 0 or 1 near it."""
    # By tanh, which cannot overflow.
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * (sub_reward_S - threshold_S) / tau)), dtype=np.float64)


GATES: dict[str, Callable[[Floats, Floats, float], Floats]] = {"hard": hard_gate, "soft": soft_gate}
"""`algorithm.gate`: [S] sub-rewards, [S] thresholds and tau to [S] the factor, from 0 to 1, that passes."""

GATES_OF_UNSCORED: dict[str, float] = {"open": 1.0, "closed": 0.0}
"""`algorithm.gate_unscored`."""

PASSING, RECEIVING = ("pass", "both"), ("receive", "both")
"""The values of `algorithm.gate_at` under which a step's gate stands between it and its parents, its children."""


def gate_factors(
    sub_reward_S: Floats,
    threshold_S: Floats,
    *,
    gate: str,
    tau: float,
    gate_unscored: str,
    scored_S: Bools,
    failed_S: Bools,
) -> Floats:
    """[S] the factor, from 0 to 1, that a step's gate lets through.

    `scored_S`: has an own sub-reward that may close the gate. `failed_S`: its scoring failed, so that `gate_unscored`
    decides; the mean that stands in for its sub-reward must not. All others are open: nothing judged them.
    """
    factor_S = np.ones_like(threshold_S)
    factor_S[scored_S] = GATES[gate](sub_reward_S[scored_S], threshold_S[scored_S], tau)
    factor_S[failed_S] = GATES_OF_UNSCORED[gate_unscored]
    return factor_S
