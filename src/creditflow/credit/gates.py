"""Gates: whether credit may leave a step for its parents, or enter it from its children.

A gate depends on the step's own sub-reward and on its threshold, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from creditflow.data import Bools, Floats

GATE_TOLERANCE = 1e-9
"""Margin for rounding: a sub-reward equal to its threshold up to rounding (a mean of thirds) does not pass."""


def is_above(sub_reward_S: Floats, threshold_S: Floats) -> Bools:
    """[S] whether `r > theta + 1e-9`; false for NaN sub-rewards."""
    return np.greater(sub_reward_S, threshold_S + GATE_TOLERANCE)


def hard_gate(sub_reward_S: Floats, threshold_S: Floats, tau: float) -> Floats:
    """[S] 1 where the sub-reward is above the threshold, else 0. `tau` is unused."""
    return is_above(sub_reward_S, threshold_S).astype(np.float64)


def soft_gate(sub_reward_S: Floats, threshold_S: Floats, tau: float) -> Floats:
    """[S] `sigmoid((r - theta) / tau)`: 1/2 at the threshold, strictly between 0 and 1 near it."""
    # tanh cannot overflow.
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * (sub_reward_S - threshold_S) / tau)), dtype=np.float64)


GATES: dict[str, Callable[[Floats, Floats, float], Floats]] = {"hard": hard_gate, "soft": soft_gate}
"""`algorithm.gate`: functions from [S] sub-rewards, [S] thresholds and tau to [S] factors in [0, 1]."""

GATES_OF_UNSCORED: dict[str, float] = {"open": 1.0, "closed": 0.0}
"""`algorithm.gate_unscored`: the gate's factor where the scoring of the step failed."""

PASSING, RECEIVING = ("pass", "both"), ("receive", "both")
"""Values of `algorithm.gate_at` that gate the credit passed to parents, and the credit received from children."""


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
    """[S] each gate's factor, in [0, 1].

    `scored_S`: steps with an own sub-reward, which may close the gate. `failed_S`: steps whose scoring failed; their
    gates follow `gate_unscored`, not the substitute for their sub-reward. All other steps are unscored and open.
    """
    factor_S = np.ones_like(threshold_S)
    factor_S[scored_S] = GATES[gate](sub_reward_S[scored_S], threshold_S[scored_S], tau)
    factor_S[failed_S] = GATES_OF_UNSCORED[gate_unscored]
    return factor_S
