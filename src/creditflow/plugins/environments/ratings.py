"""Ratings of players from the results of their games: the Bradley-Terry model on Elo's scale."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

import numpy as np

Player = TypeVar("Player", bound=Hashable)

SCALE = 400.0
"""A difference of SCALE points means odds of 10 to 1, as in Elo's ratings of chess."""
_CHANGE, _ROUNDS = 1e-10, 10_000


def bradley_terry(points: Mapping[tuple[Player, Player], tuple[float, float]], first: Player) -> dict[Player, float]:
    """Compute the ratings of the players that a chain of games links to `first`, which has 0.

    `points`: the points of both players, >= 0, for each pair that has played: 1 for a win, 1/2 for a draw. A pair comes
    once, in either order. One draw is added to each pair; without it a player that never lost would have an infinite
    rating.

    The ratings maximize the likelihood, by the iteration of Hunter (2004), "MM algorithms for generalized Bradley-Terry
    models", equation 3: s_i = W_i / sum_j n_ij / (s_i + s_j), with W_i the points of i and n_ij the games of i and j.
    The sums are over the pairs that have played: a long run has many players, and each meets few others.
    """
    index = _linked(points, first)
    pairs = [pair for pair in points if pair[0] in index]
    if not pairs:
        return {first: 0.0}
    players_E2 = np.array([[index[player] for player in pair] for pair in pairs])
    won_E2 = np.array([points[pair] for pair in pairs]) + 0.5
    players_X, won_P = players_E2.ravel(), np.bincount(players_E2.ravel(), won_E2.ravel())
    games_E = won_E2.sum(axis=1)
    strength_P = np.ones(len(index))
    for _ in range(_ROUNDS):
        share_E = games_E / strength_P[players_E2].sum(axis=1)
        new_P = won_P / np.bincount(players_X, np.repeat(share_E, 2))
        new_P /= new_P[0]
        done = np.max(np.abs(np.log(new_P / strength_P))) < _CHANGE
        strength_P = new_P
        if done:
            break
    return dict(zip(index, (SCALE * np.log10(strength_P)).tolist(), strict=True))


def _linked(pairs: Mapping[tuple[Player, Player], object], first: Player) -> dict[Player, int]:
    """The players that a chain of pairs links to the first, numbered."""
    index, before = {first: 0}, 0
    while len(index) > before:
        before = len(index)
        for one, other in pairs:
            if one in index or other in index:
                index.setdefault(one, len(index))
                index.setdefault(other, len(index))
    return index
