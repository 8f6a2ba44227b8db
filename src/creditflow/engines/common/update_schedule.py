"""`trainer.update_schedule`: which policies a training step updates, and in which order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from creditflow.config import TrainerConfig


def policies_due(step: int, trainer: TrainerConfig, names: Sequence[str], seed: int) -> list[str]:
    """The policies whose actors training step `step` (from 1) updates, in the order of their updates.

    A function of step and seed alone, so that a resumed run continues it. `sequential`: a random order of each step
    (Kuba et al. 2022, arXiv 2109.11251, algorithm 4).
    """
    after_warmup = step - trainer.critic_warmup
    if after_warmup < 1:
        return []
    if trainer.update_schedule == "alternating":
        return [names[(after_warmup - 1) % len(names)]]
    if trainer.update_schedule == "sequential":
        return [names[place] for place in np.random.default_rng((seed, step)).permutation(len(names)).tolist()]
    return list(names)
