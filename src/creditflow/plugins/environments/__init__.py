"""Environments as workflows: Gymnasium's, PettingZoo's, TextArena's, OpenEnv's, and your own, through one protocol.

    # the recipe: the address makes the tasks, and a ready workflow runs them
    data: {train_files: "textarena://TicTacToe-v0?players=2"}
    team: {workflow: "creditflow.plugins.environments:run_address", agents: {player_0: {}, player_1: {}}}
    reward: {functions: [{fn: "creditflow.plugins.environments.rewards:Returns", args: {low: -1, per_agent: true}}]}

    # or a workflow of an environment that a function makes
    solve = environments.aec(lambda task: tictactoe_v3.env())

A seat's observation and legal actions become a prompt (`show`), and the reply becomes an action (`read`). The
environment's reward for a seat between one of its actions and its next is that step's `info["reward"]`. The total
returns of the seats are the answer. `creditflow.plugins.environments.rewards` turns both into rewards.
A step's parent is the previous step of the same seat: a seat observes the others' actions through the environment. A
trajectory that `max_turns` or the environment cuts short is `truncated`. This package uses no model and no credit.
"""

from creditflow.plugins.environments.base import (
    ENVIRONMENTS,
    IllegalActionError,
    TextEnvironment,
    Turn,
    View,
    environment,
    last_number,
    plain,
)
from creditflow.plugins.environments.workflow import aec, gymnasium, parallel, run_address, text_environment

__all__ = [
    "ENVIRONMENTS",
    "IllegalActionError",
    "TextEnvironment",
    "Turn",
    "View",
    "aec",
    "environment",
    "gymnasium",
    "last_number",
    "parallel",
    "plain",
    "run_address",
    "text_environment",
]
