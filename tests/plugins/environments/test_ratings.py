"""Ratings by the Bradley-Terry model."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from creditflow.plugins.environments.ratings import bradley_terry


def rated(points_PP, order):
    """The ratings [P], with the pairs in another order."""
    pairs = [(i, j) for at, i in enumerate(order) for j in order[:at] if points_PP[i, j] + points_PP[j, i] > 0]
    ratings = bradley_terry({(i, j): (points_PP[i, j], points_PP[j, i]) for i, j in pairs}, 0)
    return np.array([ratings[player] for player in range(len(points_PP))])


@settings(deadline=None)
@given(st.lists(st.floats(0, 50), min_size=16, max_size=16), st.permutations([1, 2, 3]))
def test_ratings_predict_the_points_of_each_player(points, order):
    """At the maximum of the likelihood, each player's expected points are the points that it won."""
    points_PP = np.array(points).reshape(4, 4)
    np.fill_diagonal(points_PP, 0.0)
    points_PP[0, 1:] += 1.0  # everybody has met the first player
    ratings_P = rated(points_PP, range(4))
    counted_PP = np.where((points_PP + points_PP.T) > 0, points_PP + 0.5, 0.0)
    np.fill_diagonal(counted_PP, 0.0)
    expected_PP = 1 / (1 + 10 ** ((ratings_P[None, :] - ratings_P[:, None]) / 400))
    games_PP = counted_PP + counted_PP.T
    np.testing.assert_allclose((games_PP * expected_PP).sum(axis=1), counted_PP.sum(axis=1), rtol=1e-4)
    np.testing.assert_allclose(rated(points_PP, [0, *order]), ratings_P, atol=1e-3)


def test_player_without_games_to_the_first_is_unrated():
    apart, linked = {("c", "d"): (1.0, 0.0)}, {("e", "b"): (1.0, 2.0), ("a", "b"): (1.0, 0.0)}
    assert bradley_terry({**apart, **linked}, "a").keys() == {"a", "b", "e"}
    assert bradley_terry(apart, "a") == {"a": 0.0}
