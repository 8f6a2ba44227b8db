"""Slow, obvious versions of the fitted parts of credit: slopes, the noisy-AND posterior."""

from itertools import product
from math import prod, sqrt


def slope_and_error(scores, outcomes, weights):
    """Weighted least squares through the origin."""
    square = sum(w * x * x for x, w in zip(scores, weights, strict=True))
    slope = sum(w * x * y for x, y, w in zip(scores, outcomes, weights, strict=True)) / square
    left = sum(w * (y - slope * x) ** 2 for x, y, w in zip(scores, outcomes, weights, strict=True))
    return slope, sqrt(left / (sum(weights) - 1) / square)


def harmless(harm, likelihoods, slip, passed, survives=None):
    """P(no harm) of each step of one trajectory, by summing over all states.

    `likelihoods`: for each step, the probability of its score if it does harm and if it does not. `passed`: None for an
    unknown outcome. `survives`: for each step, the probability that its harm is survived; default: 0.
    """
    n, total = len(harm), 0.0
    survives, by_step = survives or [0.0] * n, [0.0] * n
    for state in product((False, True), repeat=n):  # True: no harm
        chance = prod(
            (1 - harm[i]) * likelihoods[i][1] if fine else harm[i] * likelihoods[i][0] for i, fine in enumerate(state)
        )
        if passed is not None:
            success = (1 - slip) * prod(1.0 if fine else survives[i] for i, fine in enumerate(state))
            chance *= success if passed else 1 - success
        total += chance
        by_step = [mine + chance * fine for mine, fine in zip(by_step, state, strict=True)]
    return [mine / total for mine in by_step]
