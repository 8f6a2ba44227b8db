"""Tic-tac-toe by self-play: the learner meets its own earlier versions, and is evaluated against random moves.

The board, the tasks and the model are those of the recipe `tic_tac_toe`. The learner moves first in every second task.
"""

from __future__ import annotations

from typing import Any

from pettingzoo.classic import tictactoe_v3

from creditflow import Task
from creditflow.plugins import environments
from creditflow.plugins.environments import View


def make_game(task: Task) -> Any:
    """A fresh board."""
    return tictactoe_v3.env()


def show(view: View) -> str:
    """The board in nine words, in the order of action numbers.

    PettingZoo's versions lay out the observation by rows or by columns; the board itself has one order.
    """
    mine, theirs = (1, 2) if view.seat == "player_1" else (2, 1)
    words = {0: "free", mine: "mine", theirs: "theirs"}
    return " ".join(words[square] for square in view.env.unwrapped.board.squares)


def agents(task: Task) -> dict[str, str]:
    """The agents of both players: the learner and an earlier version; in validation, the learner and chance."""
    opponent = "chance" if task.extra_info["split"] == "val" else "earlier"
    players = ("learner", opponent) if task.extra_info["index"] % 2 == 0 else (opponent, "learner")
    return dict(zip(("player_1", "player_2"), players, strict=True))


solve = environments.aec(make_game, agents=agents, show=show, illegal="random")
