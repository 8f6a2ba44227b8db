"""Ratings by the Bradley-Terry model."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from creditflow.plugins.environments.ratings import bradley_terry


@settings(deadline=None)
@given(st.lists(st.floats(0, 50), min_size=16, max_size=16), st.permutations([1, 2, 3]))
def test_ratings_predict_the_points_of_each_player(points, order):
    """At the maximum of the likelihood, each player's expected points are the points that it won."""
    points_PP = np.array(points).reshape(4, 4)
    np.fill_diagonal(points_PP, 0.0)
    points_PP[0, 1:] += 1.0  # everybody has met the first player
    ratings_P = bradley_terry(points_PP)
    counted_PP = np.where((points_PP + points_PP.T) > 0, points_PP + 0.5, 0.0)
    np.fill_diagonal(counted_PP, 0.0)
    expected_PP = 1 / (1 + 10 ** ((ratings_P[None, :] - ratings_P[:, None]) / 400))
    games_PP = counted_PP + counted_PP.T
    np.testing.assert_allclose((games_PP * expected_PP).sum(axis=1), counted_PP.sum(axis=1), rtol=1e-4)
    order = [0, *order]
    np.testing.assert_allclose(bradley_terry(points_PP[np.ix_(order, order)]), ratings_P[order], atol=1e-3)


def test_player_without_games_to_the_first_is_unrated():
    points_PP = np.zeros((4, 4))
    points_PP[0, 1] = points_PP[2, 3] = 1.0
    assert np.isfinite(bradley_terry(points_PP)).tolist() == [True, True, False, False]


@pytest.mark.parametrize("points", [[[0.0, -1.0], [0.0, 0.0]], [[0.0, 1.0]]])
def test_impossible_points_are_refused(points):
    with pytest.raises(ValueError, match="expected a square array of points of 0 or more"):
        bradley_terry(np.array(points))
