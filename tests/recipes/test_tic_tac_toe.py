import random

import pytest

pytest.importorskip("pettingzoo")

from creditflow._utils.loading import load_object
from creditflow.data import Task
from creditflow.plugins.environments import View
from tests.paths import RECIPES


def test_shown_free_cells_are_the_legal_moves():
    make_game, show = (load_object(f"tic_tac_toe.py:{name}", RECIPES, "test") for name in ("make_game", "show"))
    rng = random.Random(0)
    for _ in range(20):
        game = make_game(Task("game", (), None, {"split": "train", "index": 0}))
        game.reset(seed=0)
        for seat in game.agent_iter():
            observation, _, terminated, truncated, _ = game.last()
            if terminated or truncated:
                game.step(None)
                continue
            legal = tuple(int(cell) for cell in observation["action_mask"].nonzero()[0])
            shown = show(View(game, seat, observation["observation"], legal, 0)).split()
            assert tuple(cell for cell, word in enumerate(shown) if word == "free") == legal
            game.step(rng.choice(legal))
