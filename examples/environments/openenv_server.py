"""An OpenEnv server: guess a number from 0 to 9 in four tries.

`make openenv` installs OpenEnv in an environment of its own; `.venv/openenv/bin/python openenv_server.py 8000` runs it.
It prints its port; port 0 takes a free one.
"""

import random
import socket
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

TRIES = 4


class Guess(Action):  # type: ignore[misc]
    """A number from 0 to 9."""

    number: int


class Hint(Observation):  # type: ignore[misc]
    """A text for the agent."""

    text: str
    legal_actions: tuple[int, ...] = tuple(range(10))


class Guessing(Environment):  # type: ignore[misc]
    """One secret number."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.secret, self.tries = 0, 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Hint:
        self.secret, self.tries = random.Random(seed).randrange(10), 0
        return Hint(text="Guess a number from 0 to 9.")

    def step(self, action: Guess, timeout_s: float | None = None, **options: Any) -> Hint:
        self.tries += 1
        if action.number == self.secret:
            return Hint(text="Right.", reward=1.0, done=True)
        hint = "It is larger." if action.number < self.secret else "It is smaller."
        return Hint(text=hint, reward=0.0, done=self.tries == TRIES)

    @property
    def state(self) -> Any:
        """The number of tries."""
        return State(step_count=self.tries)


if __name__ == "__main__":
    listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
    app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=64)
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
