"""Environments as workflows: PettingZoo's, in turns (AEC) or at once (parallel), and Gymnasium's.

    # my_game.py
    from creditflow.rollout import environments
    from pettingzoo.classic import tictactoe_v3
    solve = environments.aec(lambda task: tictactoe_v3.env())

    # the recipe
    team: {workflow: my_game.py:solve, agents: {player_1: {}, player_2: {}}}
    reward: {functions: [{fn: "creditflow.rewards.builtin.environments:Returns", args: {low: -1, high: 1}}]}

A seat's observation and legal actions become a prompt (`show`), and the reply becomes an action (`read`). The
environment's reward for a seat between one of its actions and its next is that step's `info["reward"]`. The total
returns of the seats are the answer. `creditflow.rewards.builtin.environments` turns both into rewards.
A step's parent is the previous step of the same seat: a seat observes the others' actions through the environment. A
trajectory that `max_turns` or the environment cuts short is `truncated`. This module uses no model and no credit.
Requires `pip install 'creditflow[environments]'`.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from creditflow.data import Message, Task
from creditflow.errors import AgentError, ConfigError, did_you_mean, first_line
from creditflow.rollout import Reply, Team, Workflow

Make = Callable[[Task], Any]
"""Makes a fresh environment for a task; `task.extra_info["seed"]`, if present, is the seed of its reset."""


@dataclass(frozen=True, slots=True)
class View:
    """A seat's view of the environment at its turn."""

    env: Any
    """The environment, for details that an observation leaves out."""
    seat: str
    observation: Any
    """The observation without its action mask."""
    legal: tuple[int, ...] | None
    """Actions allowed now: those of the mask, or without a mask all actions of a discrete space. None if the space is
    not discrete or has more than 256 actions."""
    turn: int
    """Number of earlier actions of this seat."""


Show = Callable[[View], str | Sequence[Message]]
"""Makes the seat's prompt: a text, or chat messages."""
Read = Callable[[str, View], Any]
"""Returns the action that a reply means; raises ValueError (or AgentError) if it means none. Any other exception is a
mistake in the function, and fails the trajectory."""
Illegal = Literal["error", "random"]
"""Effect of an illegal action. `error`: AgentError ends the rollout with the worst outcome of its range. `random`: a
legal action is drawn at random."""
_MOST_LISTED = 256


def plain(view: View) -> str:
    """Return the observation as text (arrays row by row), and the legal actions by number."""
    text = _as_text(view.observation)
    if view.legal is None:
        return text
    return f"{text}\nLegal actions: {', '.join(map(str, view.legal))}. Answer with one of them."


def last_number(text: str, view: View) -> int:
    """Return the last whole number of a reply."""
    numbers = re.findall(r"-?\b\d{1,18}\b", text)
    if not numbers:
        raise ValueError("the reply has no number")
    return int(numbers[-1])


def aec(
    make: Make,
    *,
    agents: Mapping[str, str] | None = None,
    show: Show = plain,
    read: Read = last_number,
    illegal: Illegal = "error",
    max_turns: int = 1000,
) -> Workflow:
    """Make a workflow of a PettingZoo environment in which seats act in turn (`AECEnv`).

    `agents`: the team's agent for each seat; default: the agent with the seat's name. `max_turns`: actions of all
    seats, after which the rollout is cut short and each seat receives the rewards earned so far.
    """
    options = _Options("aec", make, {} if agents is None else agents, show, read, illegal, max_turns)

    async def play(env: Any, seats: _Seats, seed: int | None) -> None:
        env.reset(seed=seed)
        seats.begin(env.possible_agents)
        # `last` covers only the current seat. The other seats' unpaid rewards are the sums of `rewards`, as
        # PettingZoo's `api_test` requires; `_cumulative_rewards` may still contain rewards that were paid before.
        unpaid = dict.fromkeys(env.possible_agents, 0.0)
        cut: list[bool] = []
        while env.agents:
            seat = env.agent_selection
            observation, unpaid[seat], terminated, truncated, info = env.last()
            over = terminated or truncated
            if not over and seats.acted == max_turns:
                break
            seats.pay(seat, unpaid[seat])
            unpaid[seat] = 0.0
            if over:
                cut.append(truncated and not terminated)
                if len(cut) > len(env.possible_agents):  # an endless loop would block all rollouts
                    raise RuntimeError(f"{seat} has ended, and is not taken from the environment's agents")
                env.step(None)
                continue
            cut.clear()
            env.step(await seats.ask(seat, observation, info))
            for other, paid in env.rewards.items():
                unpaid[other] += float(paid)
        for seat in env.agents:
            seats.pay(seat, unpaid[seat])
        seats.end(cut, within_limit=not env.agents)

    return _workflow(options, play)


def parallel(
    make: Make,
    *,
    agents: Mapping[str, str] | None = None,
    show: Show = plain,
    read: Read = last_number,
    illegal: Illegal = "error",
    max_turns: int = 1000,
) -> Workflow:
    """Make a workflow of a PettingZoo environment in which seats act at once (`ParallelEnv`).

    `max_turns`: rounds, after which the rollout is cut short.
    """
    options = _Options("parallel", make, {} if agents is None else agents, show, read, illegal, max_turns)

    async def play(env: Any, seats: _Seats, seed: int | None) -> None:
        observed, infos = env.reset(seed=seed)
        seats.begin(env.possible_agents)
        cut: list[bool] = []
        for _ in range(max_turns):
            acting = list(env.agents)
            if not acting:
                break
            async with asyncio.TaskGroup() as group:
                tasks = {
                    seat: group.create_task(seats.ask(seat, observed[seat], infos.get(seat, {}))) for seat in acting
                }
            actions = {seat: task.result() for seat, task in tasks.items()}
            observed, paid, terminated, truncated, infos = env.step(actions)
            for seat in acting:
                seats.pay(seat, paid.get(seat, 0.0))
            cut = [truncated.get(seat, False) and not terminated.get(seat, False) for seat in acting]
        seats.end(cut, within_limit=not env.agents)

    return _workflow(options, play)


def gymnasium(
    make: Make,
    agent: str = "agent",
    *,
    show: Show = plain,
    read: Read = last_number,
    illegal: Illegal = "error",
    max_turns: int = 1000,
) -> Workflow:
    """Make a workflow of a Gymnasium environment in which `agent` acts. An `action_mask` is read from its `info`.

    `max_turns`: actions, after which the rollout is cut short.
    """
    if not isinstance(agent, str):
        raise ConfigError(f"gymnasium: agent: expected an agent's name, got {_shown(agent)}")
    options = _Options("gymnasium", make, {}, show, read, illegal, max_turns)

    async def play(env: Any, seats: _Seats, seed: int | None) -> None:
        observation, info = env.reset(seed=seed)
        seats.begin([agent])
        over = False
        while not over and seats.acted < max_turns:
            observation, paid, terminated, truncated, info = env.step(await seats.ask(agent, observation, info))
            seats.pay(agent, paid)
            over = terminated or truncated
        seats.end([truncated and not terminated], within_limit=over)

    return _workflow(options, play)


@dataclass(frozen=True, slots=True)
class _Options:
    """The arguments of a function that makes a workflow. Raises ConfigError for an invalid one."""

    called: str
    """The name of the function."""
    make: Make
    agents: Mapping[str, str]
    show: Show
    read: Read
    illegal: Illegal
    max_turns: int

    def __post_init__(self) -> None:
        for name, function in (("make", self.make), ("show", self.show), ("read", self.read)):
            if not callable(function):
                hint = "; an environment is created for each rollout: `lambda task: ...`" if name == "make" else ""
                raise self._error(name, "a function", f"{_shown(function)}{hint}")
        agents, most = self.agents, self.max_turns
        if not isinstance(agents, Mapping) or not all(isinstance(name, str) for name in agents.values()):
            raise self._error("agents", "{seat: agent}, agents by their names", _shown(agents))
        if self.illegal not in ("error", "random"):
            hint = did_you_mean(self.illegal, ("error", "random"))
            raise self._error("illegal", "error or random", f"{self.illegal!r}{hint}")
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise self._error("max_turns", "a whole number, 1 or more", repr(most))

    def environment(self, task: Task) -> Any:
        """Make a fresh environment. Raises ConfigError if another function of this module handles its kind."""
        env = self.make(task)
        expected = _KINDS[self.called][0]
        for kind, (description, module, name) in _KINDS.items():
            # If a library was not imported, no object is of its class. So the library need not be installed.
            library = sys.modules.get(module)
            if kind != self.called and library is not None and isinstance(env, getattr(library, name)):
                hint = f": use creditflow.rollout.environments.{kind}"
                raise self._error("make", expected, f"{description}{hint}")
        if not (hasattr(env, "reset") and hasattr(env, "step")):
            raise self._error("make", expected, _shown(env))
        return env

    def _error(self, argument: str, expected: str, got: str) -> ConfigError:
        return ConfigError(f"{self.called}: {argument}: expected {expected}, got {got}")


_KINDS = {
    "aec": ("PettingZoo's AECEnv, whose seats act in turn", "pettingzoo.utils.env", "AECEnv"),
    "parallel": ("PettingZoo's ParallelEnv, whose seats act at once", "pettingzoo.utils.env", "ParallelEnv"),
    "gymnasium": ("Gymnasium's Env, in which one agent acts", "gymnasium", "Env"),
}
"""For each kind of environment: the function that handles it, its description, its module and its class."""


def _workflow(options: _Options, play: Callable[[Any, _Seats, int | None], Awaitable[None]]) -> Workflow:
    async def solve(task: Task, team: Team) -> str:
        env = options.environment(task)
        seed = task.extra_info.get("seed")
        seats = _Seats(env, team, options)
        try:
            await play(env, seats, None if seed is None else int(seed))
            return seats.answer()
        finally:
            env.close()

    return solve


class _Seats:
    """The state of one rollout: its seats, their last replies, and their returns."""

    def __init__(self, env: Any, team: Team, options: _Options) -> None:
        self.env, self.team, self.options = env, team, options
        self.acted = 0
        self._last: dict[str, Reply] = {}
        self._turns: dict[str, int] = {}
        self._earned: dict[str, float] = {}

    def begin(self, seats: Sequence[str]) -> None:
        """Register the seats, with returns of 0. Raises ConfigError if `agents` has an unknown seat."""
        if unknown := sorted(set(self.options.agents) - set(seats)):
            raise ConfigError(f"agents: the environment has no seat {unknown[0]!r}; there is {', '.join(seats)}")
        self._earned = dict.fromkeys(seats, 0.0)

    def pay(self, seat: str, paid: Any) -> None:
        """Add a reward to the seat's return and to its last step; before its first action, to the return alone."""
        self._earned[seat] += float(paid)
        if seat in self._last:
            info = self._last[seat].step.info
            info["reward"] = info.get("reward", 0.0) + float(paid)

    def end(self, cut: Sequence[bool], *, within_limit: bool) -> None:
        """End the rollout.

        `cut`: for each seat that stayed to the end, whether the environment truncated it. `within_limit`: whether the
        environment ended by itself, rather than at `max_turns`.
        """
        if not within_limit:
            self.team.cut_short(f"cut short after max_turns={self.options.max_turns}")
        elif cut and all(cut):
            self.team.cut_short("cut short by the environment")

    async def ask(self, seat: str, observation: Any, info: Mapping[str, Any]) -> Any:
        """Return the seat's next action. Raises AgentError if it is illegal and `illegal` is `error`."""
        observation, mask = _without_mask(observation, info)
        view = View(self.env, seat, observation, self._legal(seat, mask), self._turns.get(seat, 0))
        parents = [self._last[seat]] if seat in self._last else []
        prompt = self.options.show(view)
        if not isinstance(prompt, str | list | tuple):
            raise ConfigError(f"show: expected a text or a list of chat messages, got {_shown(prompt)}")
        reply = await self.team[self._agent(seat)](prompt, parents=parents, info={"seat": seat})
        self.acted += 1
        self._last[seat], self._turns[seat] = reply, view.turn + 1
        action = self._action(reply, view)
        reply.step.info["action"] = action if isinstance(action, int) else str(action)
        return action

    def _agent(self, seat: str) -> str:
        return self.options.agents.get(seat, seat)

    def _space(self, seat: str) -> Any:
        space = self.env.action_space
        return space(seat) if callable(space) else space

    def _legal(self, seat: str, mask: Any) -> tuple[int, ...] | None:
        from gymnasium.spaces import Discrete

        space = self._space(seat)
        start = int(space.start) if isinstance(space, Discrete) else 0  # a mask counts from 0, as in Discrete.sample
        if mask is not None:
            return tuple((start + np.flatnonzero(mask)).tolist())
        if not isinstance(space, Discrete) or space.n > _MOST_LISTED:
            return None
        return tuple(range(start, start + int(space.n)))

    def _action(self, reply: Reply, view: View) -> Any:
        space = self._space(view.seat)
        try:
            action = self._read(reply, view)
            if (view.legal is not None and action not in view.legal) or not space.contains(action):
                raise ValueError(f"{action} is not legal")
        except (ValueError, AgentError) as error:
            reply.step.info["illegal"] = str(error)
            if self.options.illegal == "error":
                agent = self._agent(view.seat)
                raise AgentError(f"seat {view.seat}, agent {agent}, turn {view.turn}: {error}") from error
            chance = random.Random(reply.step.id)
            if view.legal is not None:
                return chance.choice(view.legal)
            space.seed(chance.getrandbits(31))
            drawn = space.sample()
            return int(drawn) if isinstance(drawn, np.integer) else drawn
        return action

    def _read(self, reply: Reply, view: View) -> Any:
        """Return the action that a reply means. Raises RuntimeError for a mistake in `read`."""
        try:
            return self.options.read(reply.text, view)
        except (ValueError, AgentError):
            raise
        except Exception as error:
            raise RuntimeError(
                f"read raised {type(error).__name__}: {first_line(error)}; "
                f"expected an action, or ValueError where the reply means none, of {reply.text[:80]!r}"
            ) from error

    def answer(self) -> str:
        """Return every seat's return as JSON, and mark each seat's last step as a source of the answer."""
        self.team.answer_from(*self._last.values())
        return json.dumps(self._earned)


def _without_mask(observation: Any, info: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the observation and the mask of legal actions, from the observation or the info."""
    mask = info.get("action_mask")
    if isinstance(observation, Mapping) and "action_mask" in observation:
        mask = observation["action_mask"]
        rest = {key: value for key, value in observation.items() if key != "action_mask"}
        observation = rest["observation"] if list(rest) == ["observation"] else rest
    return observation, mask


def _as_text(observation: Any) -> str:
    if isinstance(observation, Mapping):
        return "\n".join(f"{key}: {_as_text(value)}" for key, value in observation.items())
    if isinstance(observation, np.ndarray):
        return np.array2string(observation, threshold=4096, max_line_width=200)
    return str(observation)


def _shown(value: object) -> str:
    return f"{value!r:.80} ({type(value).__name__})"
