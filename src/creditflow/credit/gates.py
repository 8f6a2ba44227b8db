"""Gates: whether credit may leave a step for its parents.

A gate looks at a step's own sub-reward and its threshold. It does not know where the threshold comes from, nor what
flows through it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from creditflow.trajectory import Bools, Floats

GATE_TOLERANCE = 1e-9
"""A sub-reward that equals its threshold but for rounding (a mean of thirds, say) must not pass it."""


def hard_gate(sub_reward_S: Floats, threshold_S: Floats) -> Floats:
    """[S] 1 where `r > theta + 1e-9`, else 0. NaN sub-rewards count as not above."""
    return (sub_reward_S > threshold_S + GATE_TOLERANCE).astype(np.float64)


GATES: dict[str, Callable[[Floats, Floats], Floats]] = {"hard": hard_gate}
"""`algorithm.gate`: [S] sub-rewards and [S] thresholds to [S] the factor, from 0 to 1, that passes."""

GATES_OF_UNSCORED: dict[str, float] = {"open": 1.0, "closed": 0.0}
"""`algorithm.gate_unscored`."""


def gate_factors(
    sub_reward_S: Floats, threshold_S: Floats, *, gate: str, gate_unscored: str, scored_S: Bools, failed_S: Bools
) -> Floats:
    """[S] the factor, from 0 to 1, that a step passes on to its parents.

    `scored_S`: has an own sub-reward that may close the gate. `failed_S`: its scoring failed, so that `gate_unscored`
    decides; the mean that stands in for its sub-reward must not. All others are open: nothing judged them.
    """
    factor_S = np.ones_like(threshold_S)
    factor_S[scored_S] = GATES[gate](sub_reward_S[scored_S], threshold_S[scored_S])
    factor_S[failed_S] = GATES_OF_UNSCORED[gate_unscored]
    return factor_S
