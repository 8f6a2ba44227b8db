"""Slow, obvious versions of the fitted parts of credit: prefix features, ridge, slopes, the noisy-AND posterior."""

from itertools import product
from math import inf, prod, sqrt

import numpy as np


def ancestors(parents_of, index):
    """All steps above a step of a trajectory."""
    found = set()
    for parent in parents_of[index]:
        found |= {parent} | ancestors(parents_of, parent)
    return found


def features(parents_of, rewards, turns, index):
    """The features of one step; `rewards`: the sub-rewards of its trajectory, None for none."""
    scored = sorted(a for a in ancestors(parents_of, index) if rewards[a] is not None)
    wrong = [1.0 - rewards[a] for a in scored]
    return [
        sum(wrong),
        wrong[-1] if wrong else 0.0,
        max(wrong, default=0.0),
        float(len(wrong)),
        float(turns[index]),
    ]


def ridge(rows, targets, weights, penalties=(inf, 300.0, 100.0, 30.0, 10.0, 3.0, 1.0)):
    """Intercept and coefficients from the explicit design matrix, with the hat matrix for cross-validation."""
    x, y, w = np.array(rows), np.array(targets), np.array(weights)
    n = w.sum()
    if n <= 2:
        return np.zeros(1 + x.shape[1])
    mean, target_mean = w @ x / n, float(w @ y / n)
    spread = np.sqrt(w @ (x - mean) ** 2 / n)
    used = spread**2 > 1e-12 * (1 + mean**2)
    z = (x[:, used] - mean[used]) / spread[used]
    root = np.sqrt(w)
    best = (inf, inf, None)
    for penalty in penalties:
        if penalty == inf:
            beta, free = np.zeros(used.sum()), 1.0
        else:
            gram = (z.T * w) @ z + penalty * np.eye(z.shape[1])
            beta = np.linalg.solve(gram, (z.T * w) @ (y - target_mean))
            hat = (root[:, None] * z) @ np.linalg.solve(gram, (root[:, None] * z).T)
            free = 1.0 + np.trace(hat)
        left = w @ (y - target_mean - z @ beta) ** 2 / n
        error = left / (1 - free / n) ** 2 if free < n else inf
        if error < best[0]:
            best = (error, penalty, beta)
    if best[1] == inf:
        return np.zeros(1 + x.shape[1])
    slope = np.zeros(x.shape[1])
    slope[used] = best[2] / spread[used]
    return np.concatenate([[target_mean - slope @ mean], slope])


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
