"""Gates: whether credit may leave a step for its parents.

A gate depends on the step's own sub-reward and on its threshold alone. Unscored steps have open gates.
"""

from __future__ import annotations

import numpy as np

from creditflow.data import Bools, Floats

GATE_TOLERANCE = 1e-9
"""Margin for rounding: a sub-reward equal to its threshold up to rounding (a mean of thirds) does not pass."""


def is_above(sub_reward_S: Floats, threshold_S: Floats) -> Bools:
    """[S] whether `r > theta + 1e-9`; false for NaN sub-rewards."""
    return np.greater(sub_reward_S, threshold_S + GATE_TOLERANCE)
