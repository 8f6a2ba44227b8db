"""Two agents at PettingZoo's tic-tac-toe: one is trained, the other plays at random or is an earlier version of it.

A board is nine words from the player's own side (`mine`, `theirs`, `free`), an action a digit. The model is warmed up
on random boards until its moves are mostly legal and otherwise random, so that the first player begins with about the
win rate of random moves. An illegal move is replaced by a random one.

Recipe settings (`recipe.*`): `train_tasks`, `val_tasks`; `hidden`, `layers`; `legal`, the share of legal moves at which
the warm-up stops.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from pettingzoo.classic import tictactoe_v3

from creditflow import Task
from creditflow.engines.local.policy import Policy
from creditflow.engines.local.warm_up import warm_up, word_model
from creditflow.plugins import environments
from creditflow.plugins.environments import View
from creditflow.rollout import GenerationRequest

CELLS = 9
FREE, MINE, THEIRS = "free", "mine", "theirs"


# The game


def make_tasks(split: str, recipe: dict[str, Any]) -> list[Task]:
    """The same empty board each time: tasks differ only in their index."""
    number = {"train": recipe["train_tasks"], "val": recipe["val_tasks"]}[split]
    prompt = ({"role": "user", "content": "play"},)
    return [Task("tic_tac_toe", prompt, None, {"index": index, "split": split}) for index in range(number)]


def make_game(task: Task) -> Any:
    """A fresh board."""
    return tictactoe_v3.env()


def show(view: View) -> str:
    """The board in nine words, in the order of action numbers.

    PettingZoo's versions lay out the observation by rows or by columns; the board itself has one order.
    """
    mine, theirs = (1, 2) if view.seat == "player_1" else (2, 1)
    words = {0: FREE, mine: MINE, theirs: THEIRS}
    return " ".join(words[square] for square in view.env.unwrapped.board.squares)


def opponents(task: Task) -> dict[str, str]:
    """The agents of self-play, where the learner moves first in every second task. In validation it meets chance."""
    opponent = "chance" if task.extra_info["split"] == "val" else "earlier"
    players = ("learner", opponent) if task.extra_info["index"] % 2 == 0 else (opponent, "learner")
    return dict(zip(("player_1", "player_2"), players, strict=True))


solve = environments.aec(make_game, show=show, illegal="random")
"""The first player learns; the second keeps the initial policy of both."""
self_play = environments.aec(make_game, agents=opponents, show=show, illegal="random")
"""The learner meets its own earlier versions."""


# The model, warmed up to make legal moves that are otherwise random

WARM_UP_VERSION = 1
"""Part of the cached folder's name; to be raised with every change of the warm-up."""


def warm_model(recipe: dict[str, Any]) -> Path:
    """The folder of a small Llama that makes mostly legal moves; made on first use and cached."""
    settings = {key: recipe[key] for key in ("hidden", "layers", "legal")}
    return word_model(f"tic_tac_toe-{WARM_UP_VERSION}", settings, WORDS, 32, _teach)


WORDS = (FREE, MINE, THEIRS, *map(str, range(CELLS)))
"""The vocabulary, one token per word."""


def _example(rng: random.Random) -> tuple[str, str]:
    """A board after some random moves, and a random legal move."""
    moves = rng.sample(range(CELLS), rng.randrange(CELLS))
    board = [FREE] * CELLS
    for k, cell in enumerate(reversed(moves)):
        board[cell] = THEIRS if k % 2 == 0 else MINE
    return " ".join(board), str(rng.choice([cell for cell in range(CELLS) if board[cell] == FREE]))


def _teach(policy: Policy, settings: dict[str, Any]) -> None:
    rng = random.Random(0)

    def learned(step: int) -> bool:
        if step % 25:
            return False
        legal = _legal(policy)
        print(f"warm-up step {step}: {legal:.2f} of the moves are legal", file=sys.stderr, flush=True)
        return legal >= float(settings["legal"])

    warm_up(policy, lambda: [[_example(rng) for _ in range(256)]], learned, most_steps=2000)


def _legal(policy: Policy) -> float:
    rng = random.Random(1)
    boards = [_example(rng)[0] for _ in range(512)]
    requests = [
        GenerationRequest(tuple(policy.tokenizer(board)["input_ids"]), 2, 1.0, (i,)) for i, board in enumerate(boards)
    ]
    moves = [policy.decode(generation.response_ids) for generation in policy.generate(requests)]
    allowed = [{str(cell) for cell, word in enumerate(board.split()) if word == FREE} for board in boards]
    return sum(move in cells for move, cells in zip(moves, allowed, strict=True)) / len(boards)
