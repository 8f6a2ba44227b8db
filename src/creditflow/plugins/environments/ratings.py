"""Ratings of players from the results of their games: the Bradley-Terry model on Elo's scale."""

from __future__ import annotations

import numpy as np

from creditflow.data import Floats

SCALE = 400.0
"""A difference of SCALE points means odds of 10 to 1, as in Elo's ratings of chess."""
_CHANGE, _ROUNDS = 1e-10, 10_000


def bradley_terry(points_PP: Floats) -> Floats:
    """Compute the ratings [P] of P players, of which the first has 0.

    `points_PP`: the points of player i against player j, >= 0: 1 for a win, 1/2 for a draw. One draw is added
    to each pairing that was played; without it a player that never lost would have an infinite rating. Players without
    a chain of games to the first player have NaN.

    The ratings maximize the likelihood, by the iteration of Hunter (2004), "MM algorithms for generalized Bradley-Terry
    models", equation 3: s_i = W_i / sum_j n_ij / (s_i + s_j), with W_i the points of i and n_ij the games of i and j.
    Raises ValueError for negative points.
    """
    points_PP = np.asarray(points_PP, dtype=np.float64)
    if np.any(points_PP < 0) or points_PP.shape != (len(points_PP), len(points_PP)):
        raise ValueError("expected a square array of points of 0 or more")
    played_PP = (points_PP + points_PP.T) > 0
    np.fill_diagonal(played_PP, val=False)
    linked_P = _linked(played_PP)
    ratings_P = np.full(len(points_PP), np.nan)
    ratings_P[linked_P] = 0.0
    chosen = np.ix_(linked_P, linked_P)
    won_PP = np.where(played_PP, points_PP + 0.5, 0.0)[chosen]
    games_PP, won_P = won_PP + won_PP.T, won_PP.sum(axis=1)
    if len(won_P) < 2:
        return ratings_P
    strength_P = np.ones(len(won_P))
    for _ in range(_ROUNDS):
        new_P = won_P / (games_PP / (strength_P[:, None] + strength_P)).sum(axis=1)
        new_P /= new_P[0]
        done = np.max(np.abs(np.log(new_P / strength_P))) < _CHANGE
        strength_P = new_P
        if done:
            break
    ratings_P[linked_P] = SCALE * np.log10(strength_P)
    return ratings_P


def _linked(played_PP: np.ndarray) -> np.ndarray:
    """[P] whether a chain of games leads to the first player."""
    linked_P = np.zeros(len(played_PP), dtype=np.bool_)
    linked_P[:1] = True
    while np.any(more_P := played_PP[linked_P].any(axis=0) & ~linked_P):
        linked_P |= more_P
    return linked_P
