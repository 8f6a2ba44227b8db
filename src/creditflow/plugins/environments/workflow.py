"""Workflows that run environments: by an address in the task, or by a function that makes an environment."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

from creditflow.data import Message, Task
from creditflow.errors import AgentError, ConfigError, did_you_mean, first_line
from creditflow.plugins.environments.adapters.gymnasium import GymnasiumEnvironment
from creditflow.plugins.environments.adapters.pettingzoo import AecEnvironment, ParallelEnvironment
from creditflow.plugins.environments.base import ENVIRONMENTS, IllegalActionError, TextEnvironment, Turn, View
from creditflow.plugins.environments.tasks import DEFAULT_TURNS, Illegal, parse_environment_address
from creditflow.rollout import Reply, Team, Workflow

Make = Callable[[Task], Any]
"""Makes a fresh environment for a task; `task.extra_info["seed"]`, if present, is the seed of its reset."""
Show = Callable[[View], str | Sequence[Message]]
"""Makes the seat's prompt: a text, or chat messages."""
Read = Callable[[str, View], Any]
"""Returns the action that a reply means; raises ValueError (or AgentError) if it means none. Any other exception is a
mistake in the function, and fails the trajectory."""
Agents = Mapping[str, str] | Callable[[Task], Mapping[str, str]]
"""The team's agent for each seat, or a function of the task that returns it. A seat that it leaves out belongs to the
agent with the seat's name, or to the only agent of the team."""


class _SharedOptions(TypedDict, total=False):
    """Options of every kind of environment."""

    show: Show | None
    """Default: the environment's own."""
    read: Read | None
    """Default: the environment's own."""
    illegal: Illegal
    """The effect of an illegal action: `error` (default) ends the rollout, `random` draws another action."""
    max_turns: int
    """Turns after which the rollout is cut short; default 1000."""


class _TeamOptions(_SharedOptions, total=False):
    """Options of environments with several seats."""

    agents: Agents | None


async def run_address(task: Task, team: Team) -> str:
    """Run the environment of a task that `data.train_files` made from an address. A ready `team.workflow`."""
    text = task.extra_info.get("environment")
    if not isinstance(text, str):
        raise ConfigError(
            "team.workflow: creditflow.plugins.environments:run_address runs tasks of an address (data.train_files: "
            f"textarena://...), got a task of {task.data_source!r}"
        )
    address = parse_environment_address(text, "data.train_files")
    make = ENVIRONMENTS[address.scheme]
    options = _Options("run_address", make, illegal=address.illegal, max_turns=address.max_turns)
    return await _run(make(address), task, team, options)


def text_environment(make: Callable[[Task], TextEnvironment], **options: Unpack[_TeamOptions]) -> Workflow:
    """Make a workflow of any `TextEnvironment`. Without `show` and `read`, those of the environment are used."""
    return _workflow(_Options("text_environment", make, **options), lambda env: env)


def aec(make: Make, **options: Unpack[_TeamOptions]) -> Workflow:
    """Make a workflow of a PettingZoo environment in which seats act in turn (`AECEnv`).

    `max_turns`: actions of all seats, after which the rollout is cut short and each seat receives the rewards earned so
    far.
    """
    return _workflow(_Options("aec", make, **options), AecEnvironment)


def parallel(make: Make, **options: Unpack[_TeamOptions]) -> Workflow:
    """Make a workflow of a PettingZoo environment in which seats act at once (`ParallelEnv`).

    `max_turns`: rounds, after which the rollout is cut short.
    """
    return _workflow(_Options("parallel", make, **options), ParallelEnvironment)


def gymnasium(make: Make, agent: str = "agent", **options: Unpack[_SharedOptions]) -> Workflow:
    """Make a workflow of a Gymnasium environment in which `agent` acts. An `action_mask` is read from its `info`.

    `max_turns`: actions, after which the rollout is cut short.
    """
    if not isinstance(agent, str):
        raise ConfigError(f"gymnasium: agent: expected an agent's name, got {_shown(agent)}")
    return _workflow(_Options("gymnasium", make, **options), lambda env: GymnasiumEnvironment(env, agent))


@dataclass(frozen=True, slots=True)
class _Options:
    """The arguments of a function that makes a workflow. Raises ConfigError for an invalid one."""

    called: str
    """The name of the function."""
    make: Callable[..., Any]
    agents: Agents | None = None
    show: Show | None = None
    read: Read | None = None
    illegal: Illegal = "error"
    max_turns: int = DEFAULT_TURNS

    def __post_init__(self) -> None:
        for name, function in (("make", self.make), ("show", self.show), ("read", self.read)):
            if not callable(function) and (function is not None or name == "make"):
                hint = "; an environment is created for each rollout: `lambda task: ...`" if name == "make" else ""
                raise self._error(name, "a function", f"{_shown(function)}{hint}")
        if self.agents is not None and not callable(self.agents):
            self.expect_agents(self.agents)
        most = self.max_turns
        if self.illegal not in ("error", "random"):
            hint = did_you_mean(self.illegal, ("error", "random"))
            raise self._error("illegal", "error or random", f"{self.illegal!r}{hint}")
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise self._error("max_turns", "a whole number, 1 or more", repr(most))

    def expect_agents(self, agents: object) -> None:
        """Raise ConfigError unless `agents` maps seats to names."""
        if not isinstance(agents, Mapping) or not all(isinstance(name, str) for name in agents.values()):
            raise self._error("agents", "{seat: agent}, agents by their names", _shown(agents))

    def environment(self, task: Task) -> Any:
        """Make a fresh environment. Raises ConfigError if another function of this module handles its kind."""
        env = self.make(task)
        expected, *_ = _KINDS[self.called]
        for kind, (description, module, name) in _KINDS.items():
            # If a library was not imported, no object is of its class. So the library need not be installed.
            library = sys.modules.get(module)
            if kind != self.called and library is not None and isinstance(env, getattr(library, name)):
                hint = f": use creditflow.plugins.environments.{kind}"
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
    "text_environment": ("a TextEnvironment", "creditflow.plugins.environments.base", "TextEnvironment"),
}
"""For each kind of environment: the function that handles it, its description, its module and its class."""


def _workflow(options: _Options, adapt: Callable[[Any], TextEnvironment]) -> Workflow:
    async def solve(task: Task, team: Team) -> str:
        return await _run(adapt(options.environment(task)), task, team, options)

    return solve


async def _run(env: TextEnvironment, task: Task, team: Team, options: _Options) -> str:
    """Run an environment to its end; returns the answer."""
    seed = task.extra_info.get("seed")
    try:
        turn = await env.reset(None if seed is None else int(seed))
        seats = _Seats(env, task, team, options)
        seats.take(turn)
        played = 0
        while turn.observations and played < options.max_turns:
            turn = await seats.act(turn)
            seats.take(turn)
            played += 1
        seats.end(turn)
        return seats.answer()
    finally:
        await env.close()


class _Seats:
    """The state of one rollout: its seats, their last replies, and their returns."""

    def __init__(self, env: TextEnvironment, task: Task, team: Team, options: _Options) -> None:
        """Raises ConfigError if `agents` has an unknown seat."""
        self.env, self.team, self.options = env, team, options
        self._last: dict[str, Reply] = {}
        self._turns: dict[str, int] = {}
        seats = list(env.seats)
        self._earned = dict.fromkeys(seats, 0.0)
        agents = options.agents(task) if callable(options.agents) else options.agents or {}
        options.expect_agents(agents)
        if unknown := sorted(set(agents) - set(seats)):
            raise ConfigError(f"agents: the environment has no seat {unknown[0]!r}; there is {', '.join(seats)}")
        self._agents = agents
        team.keep_info(seats={seat: self._agent(seat) for seat in seats})

    def take(self, turn: Turn) -> None:
        """Add a turn's rewards to the returns and to the seats' last steps, and record its faults there.

        A reward before a seat's first action counts in its return alone.
        """
        for seat, paid in turn.rewards.items():
            self._earned[seat] += paid
            if seat in self._last:
                info = self._last[seat].step.info
                info["reward"] = info.get("reward", 0.0) + paid
        for seat, fault in turn.faults.items():
            self._last[seat].step.info.setdefault("illegal", fault)

    def end(self, turn: Turn) -> None:
        """End the rollout after its last turn."""
        if turn.observations:
            self.team.cut_short(f"cut short after max_turns={self.options.max_turns}")
        elif turn.truncated:
            self.team.cut_short("cut short by the environment")

    async def act(self, turn: Turn) -> Turn:
        """Let all seats of a turn act; returns the next turn.

        Raises AgentError if an action is illegal and `illegal` is `error`, or if no legal one can be drawn.
        """
        if len(turn.observations) == 1:
            ((seat, observation),) = turn.observations.items()
            view = self._view(seat, observation, turn)
            action = await self._ask(view)
            try:
                return await self.env.step({seat: action})
            except IllegalActionError as error:
                return await self.env.step({seat: self._replaced(view, error)})
        views = [self._view(seat, observation, turn) for seat, observation in turn.observations.items()]
        async with asyncio.TaskGroup() as group:
            tasks = {view.seat: group.create_task(self._ask(view)) for view in views}
        return await self.env.step({seat: task.result() for seat, task in tasks.items()})

    def _view(self, seat: str, observation: Any, turn: Turn) -> View:
        legal = turn.legal.get(seat)
        return View(self.env.env, seat, observation, None if legal is None else tuple(legal), self._turns.get(seat, 0))

    async def _ask(self, view: View) -> Any:
        """Return the seat's next action."""
        seat = view.seat
        parents = [self._last[seat]] if seat in self._last else []
        prompt = self.env.show(view) if self.options.show is None else self.options.show(view)
        if not isinstance(prompt, str | list | tuple):
            raise ConfigError(f"show: expected a text or a list of chat messages, got {_shown(prompt)}")
        reply = await self.team[self._agent(seat)](prompt, parents=parents, info={"seat": seat})
        self._last[seat], self._turns[seat] = reply, view.turn + 1
        try:
            action = self._read(reply, view)
            self.env.check(action, view)
        except (ValueError, AgentError) as error:
            return self._replaced(view, error)
        self._note(reply, action)
        return action

    def _replaced(self, view: View, error: Exception) -> Any:
        """Record an illegal action, and draw another if `illegal` is `random`."""
        reply = self._last[view.seat]
        reply.step.info["illegal"] = str(error)
        fault = AgentError(f"seat {view.seat}, agent {self._agent(view.seat)}, turn {view.turn}: {error}")
        if self.options.illegal == "error":
            raise fault from error
        try:
            action = self.env.draw(view, random.Random(reply.step.id))
        except NotImplementedError:
            raise fault from error
        self._note(reply, action)
        return action

    def _note(self, reply: Reply, action: Any) -> None:
        reply.step.info["action"] = action if isinstance(action, int) else str(action)

    def _agent(self, seat: str) -> str:
        if seat in self._agents:
            return self._agents[seat]
        names = self.team.agent_names
        return names[0] if seat not in names and len(names) == 1 else seat

    def _read(self, reply: Reply, view: View) -> Any:
        """Return the action that a reply means. Raises RuntimeError for a mistake in `read`."""
        read = self.env.read if self.options.read is None else self.options.read
        try:
            return read(reply.text, view)
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


def _shown(value: object) -> str:
    return f"{value!r:.80} ({type(value).__name__})"
