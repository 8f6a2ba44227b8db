"""The input and output of estimators, which turn credit into advantages for the loss.

An estimator reads credit and groups. It is independent of the propagation rule and of the model.

    advantage = weight * (credit - baseline - shift) / divisor

An estimator sets baseline and divisor. With whitening, the divisor is the standard deviation over all trained tokens of
a policy, and their mean is the shift (the baseline, for an estimator without groups); otherwise the shift is 0. `gae`
computes advantages from a critic's values.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from creditflow.data import Floats, TrajectoryBatch
from creditflow.errors import ConfigError, NotFiniteError, ShapeError


def check_values(batch: TrajectoryBatch, values_T: NDArray[Any] | None, estimator: str) -> Floats:
    """[T] the critic's values as floats. Raises ConfigError if missing, ShapeError for the wrong shape.

    Non-finite values are found when they are used, see `refuse_values`.
    """
    if values_T is None:
        raise ConfigError(f"algorithm.adv_estimator: {estimator} expects a critic's values for each token, got none")
    values_T = np.asarray(values_T)
    if values_T.shape != batch.response_mask.shape:
        raise ShapeError(f"values: expected shape {batch.response_mask.shape}, got {values_T.shape}")
    return values_T if values_T.dtype in (np.float32, np.float64) else values_T.astype(np.float64)


def refuse_values(batch: TrajectoryBatch, values_T: Floats) -> NoReturn:
    """Raise NotFiniteError for values that led to advantages that are not finite."""
    wrong_T = batch.response_mask & ~np.isfinite(values_T)
    if not wrong_T.any():
        raise NotFiniteError(
            f"values: expected numbers that advantages can be made of, got up to {np.abs(values_T).max()}"
        )
    token = int(np.argmax(wrong_T))
    s = int(np.searchsorted(batch.token_offsets, token, side="right")) - 1
    raise NotFiniteError(
        f"step {batch.step_ids[s]}, token {token - batch.token_offsets[s]}: expected a finite value, "
        f"got {values_T[token]}"
    )
