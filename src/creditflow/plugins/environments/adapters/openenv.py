"""OpenEnv's environments, which a server runs: `openenv://127.0.0.1:8000?action=message`.

Each rollout has a separate session, over a WebSocket at `/ws`. The server's messages come from outside, so their size
and their types are checked.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from creditflow._utils.install import needs
from creditflow._utils.sections import Section, Text, checked, expected
from creditflow.errors import ConfigError, first_line
from creditflow.plugins.environments.base import (
    MOST_LISTED,
    IllegalActionError,
    TextEnvironment,
    Turn,
    View,
    environment,
    last_number,
    plain,
)
from creditflow.plugins.environments.tasks import EnvironmentAddress

SEAT = "agent"
MOST_BYTES = 1 << 20
"""Size of a message from the server; a longer one fails the trajectory."""
MOST_CHARACTERS = 16_000
"""Characters of an action that is a text."""
_LEGAL = "legal_actions"
"""The field of an observation that lists the numbers of legal actions, as in OpenEnv's OpenSpiel games. It stays in the
observation unless replies are numbers: then the prompt lists the legal ones, and others are illegal."""


class OpenEnvEnvironment(TextEnvironment):
    """A session of an OpenEnv server, with one seat."""

    def __init__(self, url: str, options: _Options) -> None:
        self._url, self._options = url, options
        self._socket: Any = None
        self._slot: asyncio.Semaphore | None = None

    @property
    def seats(self) -> Sequence[str]:
        return [SEAT]

    async def reset(self, seed: int | None) -> Turn:
        slot = _slots(self._url, self._options.sessions)
        await slot.acquire()
        self._slot = slot
        self._socket = await self._connect()
        options = (self._options.model_extra or {}) | ({} if seed is None else {"seed": seed})
        return self._turn(await self._ask("reset", options))

    async def step(self, actions: Mapping[str, Any]) -> Turn:
        return self._turn(await self._ask("step", actions[SEAT]))

    async def close(self) -> None:
        try:
            if self._socket is not None:
                await self._socket.close()
        finally:
            if self._slot is not None:
                self._slot.release()

    def show(self, view: View) -> str | Sequence[Any]:
        field = self._options.observation
        if field is None:
            return plain(view)
        return str(view.observation.get(field, "")) if isinstance(view.observation, Mapping) else ""

    def read(self, text: str, view: View) -> dict[str, Any]:
        """Return the action's fields. Raises ValueError if the reply has none."""
        kind, value = self._options.kind, text[:MOST_CHARACTERS].encode("utf-8", "replace").decode()
        if kind == "json":
            try:
                action = json.loads(value)
            except RecursionError:
                action = None
            if not isinstance(action, dict):
                raise ValueError(f"expected a JSON object, got {value[:80]!r}")
            return action
        return {self._options.action: last_number(value, view) if kind == "number" else value}

    def check(self, action: Any, view: View) -> None:
        if view.legal is not None and (number := action.get(self._options.action)) not in view.legal:
            raise ValueError(f"{number} is not legal")

    def draw(self, view: View, chance: random.Random) -> dict[str, Any]:
        return {self._options.action: super().draw(view, chance)}

    async def _connect(self) -> Any:
        from websockets.asyncio.client import connect
        from websockets.exceptions import WebSocketException

        try:
            return await connect(self._url, max_size=MOST_BYTES, open_timeout=self._options.timeout, proxy=None)
        except (OSError, TimeoutError, WebSocketException) as error:
            raise RuntimeError(f"{self._url}: no connection: {first_line(error)}") from error

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        from websockets.exceptions import WebSocketException

        try:
            async with asyncio.timeout(self._options.timeout):
                await self._socket.send(json.dumps({"type": kind, "data": data}))
                answer = json.loads(await self._socket.recv())
        except (OSError, TimeoutError, WebSocketException, ValueError, RecursionError) as error:
            raise RuntimeError(f"{self._url}: {kind}: {type(error).__name__}: {first_line(error)}") from error
        content = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(content, dict):
            raise RuntimeError(f"{self._url}: {kind}: expected a message of OpenEnv, got {answer!r:.80}")
        if answer.get("type") == "error":
            why = f"{str(content.get('code'))[:40]}: {str(content.get('message'))[:200]}"
            if kind == "step" and content.get("code") == "VALIDATION_ERROR":
                raise IllegalActionError(why)
            raise RuntimeError(f"{self._url}: {kind}: {why}{_HINTS.get(str(content.get('code')), '')}")
        return content

    def _turn(self, content: Mapping[str, Any]) -> Turn:
        observation, paid, done = content.get("observation"), content.get("reward"), content.get("done", False)
        reward = 0.0 if paid is None else paid
        if not isinstance(observation, dict) or not isinstance(done, bool) or not _is_number(reward):
            raise RuntimeError(f"{self._url}: expected observation, reward and done, got {content!r:.80}")
        rewards = {SEAT: float(reward)}
        if done:
            return Turn(rewards=rewards)
        if (legal := _numbers(observation.get(_LEGAL)) if self._options.kind == "number" else None) is not None:
            del observation[_LEGAL]
        if not observation.get("metadata"):  # every observation of OpenEnv has this field, mostly empty
            observation.pop("metadata", None)
        return Turn({SEAT: observation}, {SEAT: legal}, rewards)


_HINTS = {"CAPACITY_REACHED": "; lower `sessions` of the address, or raise the server's max_concurrent_envs"}


class _Options(Section, extra="allow"):
    """The options of an address. The others are sent with `reset`."""

    action: Text = "message"
    """The field of the action that holds the reply."""
    kind: Annotated[Literal["text", "number", "json"], expected("text, number, json")] = "text"
    """The reply as `text`, its last `number`, or all fields as `json`."""
    observation: str | None = None
    """The field of the observation that is the prompt; None: all fields."""
    timeout: Annotated[float, Field(gt=0)] = 60
    """Seconds for one answer of the server."""
    sessions: Annotated[int, Field(ge=1), expected("a whole number of 1 or more")] = 64
    """Sessions that are open at the same time."""
    tls: bool = False


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def _numbers(legal: object) -> tuple[int, ...] | None:
    """The listed actions, if they are whole numbers and not too many."""
    if not isinstance(legal, list) or not 0 < len(legal) <= MOST_LISTED:
        return None
    return tuple(legal) if all(type(action) is int for action in legal) else None


_SLOTS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, int], asyncio.Semaphore]] = (
    weakref.WeakKeyDictionary()
)


def _slots(url: str, sessions: int) -> asyncio.Semaphore:
    """The semaphore of a server's sessions in this event loop."""
    own = _SLOTS.setdefault(asyncio.get_running_loop(), {})
    return own.setdefault((url, sessions), asyncio.Semaphore(sessions))


@environment("openenv")
def open_address(address: EnvironmentAddress) -> TextEnvironment:
    """Make a session of the server at the address. Connects at `reset`."""
    with needs(address.text, "openenv"):
        import websockets  # noqa: F401
    try:
        options = checked(_Options, address.options)
    except ConfigError as error:
        raise ConfigError(f"{address.text}: {error}") from error
    return OpenEnvEnvironment(f"{'wss' if options.tls else 'ws'}://{address.name.rstrip('/')}/ws", options)
