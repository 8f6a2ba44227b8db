"""`conditional`: a propagation rule outside the package, for `benchmarks.study`.

A step's received credit is centered among steps in the same situation, with or without a scored descendant whose gate
closed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from creditflow.credit import Credit, PropagationInput, propagation_rule
from creditflow.credit.records import PROPAGATION_RULES


def conditional(inputs: PropagationInput) -> Credit:
    """`threshold`, with received credit centered separately for steps with and without a closed scored descendant."""
    made = PROPAGATION_RULES["threshold"].credit(inputs)
    batch = inputs.batch
    closed_S = inputs.scored_S & ~inputs.open_S
    under_S = np.zeros(batch.n_steps, dtype=np.bool_)
    for child, parent in zip(batch.edge_child[::-1].tolist(), batch.edge_parent[::-1].tolist(), strict=True):
        under_S[parent] |= closed_S[child] | under_S[child]
    cell_S = 2 * batch.agent_of_step + under_S
    cells = 2 * (int(batch.agent_of_step.max()) + 1)
    mean_C = np.bincount(cell_S, made.received_S, cells) / np.maximum(np.bincount(cell_S, minlength=cells), 1)
    return replace(made, received_S=made.received_S - mean_C[cell_S])


def register() -> None:
    """Register the rule for recipes of this process."""
    if conditional.__name__ not in PROPAGATION_RULES.names():
        propagation_rule(conditional.__name__)(conditional)
