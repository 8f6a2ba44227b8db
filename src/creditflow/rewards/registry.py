"""Reward functions: the decorators that declare them, and the ready-made ones by name."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, cast, overload

from creditflow._utils.tracebacks import located
from creditflow.data import Step, Task
from creditflow.errors import RewardError, first_line
from creditflow.registry import Registry

Level = Literal["step", "trajectory", "outcome"]
F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")

_MARK = "__creditflow_reward__"
REWARD_FUNCTIONS: Registry[Callable[..., Any]] = Registry(
    "reward.functions.fn", "creditflow.rewards.builtin", "creditflow.rewards", kind=Callable
)
"""The functions that a recipe may use by their bare names."""


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """One entry of `reward.functions`, ready to be called."""

    name: str
    level: Level
    call: Callable[..., Any]
    """step: `call(step, trajectory)`; trajectory and outcome: `call(trajectory)`."""
    agent_match: re.Pattern[str] | None = None
    """Searched in the agent's name; None: every agent."""
    weight: float = 1.0
    """Weight in the mean of a step's scores. 0: measured and reported, never part of credit."""
    range: tuple[float, float] = (0.0, 1.0)
    version: str = ""
    """A hash of the function's source and its arguments (without the helpers that it calls)."""
    identity: str = ""
    """Location of the function, and its arguments: two functions with the same source text differ. Calls are cached by
    identity and version; a function without an identity is called every time.
    """
    is_async: bool = False
    timeout: float | None = None
    """Time limit of one call in seconds; None: the manager's."""
    cache: bool = True
    inline: bool = False
    """Whether its calls stay in the manager's process: it holds a model, or a policy of the run."""
    cache_key: Callable[..., str | None] | None = None
    """Called like `call`; returns a text that holds everything that the score depends on, or None to disable caching.
    Default: everything about the trajectory.
    """
    instance: object = None
    """The instance, if the recipe names a class. See `load_reward_functions`."""
    parts: tuple[RewardFunction, ...] = ()
    """The parts of a sum."""
    when: Callable[[Step], bool] | None = None
    """Selects the steps to score among those of its agents; None: all of them."""
    agents: tuple[str, ...] = ()
    """The agents of the team, which outcomes by agent may name in addition to those of the trajectory's steps."""
    signature: str = ""
    """The library for which the function was written (`signatures`); empty for functions of creditflow."""
    declares_range: bool = True
    """Whether a decorator, a class or the entry sets the range; otherwise it is the default."""
    read_truth: Callable[[Any], object] | None = None
    """Raises ValueError for a ground truth that the function cannot read; None: any can be read."""

    def unreadable_truths(self, tasks: Iterable[Task]) -> dict[int, str]:
        """The reasons by the rows, from 0, of the tasks whose ground truth the function cannot read."""
        reasons: dict[int, str] = {}
        for row, task in enumerate(tasks if self.read_truth else ()):
            try:
                self.read_truth(task.ground_truth)  # type: ignore[misc]
            except Exception as error:  # a user's function may raise anything
                reasons[row] = located(error, f"{type(error).__name__}: {first_line(error)}")
        return reasons

    def matches(self, step: Step) -> bool:
        """Whether this function scores the step. Raises RewardError, with the reason, if `when` fails."""
        if self.agent_match is not None and self.agent_match.search(step.agent) is None:
            return False
        if self.when is None:
            return True
        try:
            answer = self.when(step)
        except Exception as error:
            why = located(error, f"{type(error).__name__}: {first_line(error)}")
            raise RewardError(f"`when` raised {why}") from error
        answer = answer.item() if hasattr(answer, "item") else answer  # numpy's
        if not isinstance(answer, bool):
            raise RewardError(f"expected `when` to answer True or False, got {answer!r}")
        return answer


@dataclass(frozen=True, slots=True)
class Declared:
    """The properties that a decorator declares."""

    level: Literal["step", "trajectory", "outcome", "answer"]
    agent_match: str | None = None
    weight: float = 1.0
    range: tuple[float, float] = (0.0, 1.0)
    name: str | None = None
    timeout: float | None = None
    when: Callable[[Step], bool] | None = None
    read_truth: Callable[[Any], object] | None = None


class Decorator(Protocol[P]):
    """A decorator that is used with options or without: `@reward(weight=2)`, `@reward`. It returns the function."""

    @overload
    def __call__(self, function: F, /) -> F: ...

    @overload
    def __call__(self, *args: P.args, **options: P.kwargs) -> Callable[[F], F]: ...


def _decorator(declare: Callable[P, Declared]) -> Decorator[P]:
    """The decorator that marks a function with the properties that `declare` makes of its options."""

    @functools.wraps(declare)
    def decorate(*functions: Any, **options: Any) -> Any:
        declared = declare(**options)  # type: ignore[call-arg]  # P has keywords alone

        def mark(function: F) -> F:
            setattr(function, _MARK, declared)
            return function

        return mark(functions[0]) if functions else mark

    return cast(Decorator[P], decorate)


@_decorator
def reward(
    *,
    agent_match: str | None = None,
    weight: float = 1.0,
    level: Literal["step", "trajectory"] = "step",
    range: tuple[float, float] = (0.0, 1.0),
    name: str | None = None,
    timeout: float | None = None,
    when: Callable[[Step], bool] | None = None,
) -> Declared:
    """Declare a function of sub-rewards. The function itself stays as it is.

    `level="step"`: `f(step, trajectory)` returns the step's score: a number, one number per response token, or a Score.
    `level="trajectory"`: `f(trajectory)` returns a list with one of these per step.
    `agent_match`: a regular expression (re.search) on the agent's name. `when`: selects the steps to score, by
    properties that a step has before scoring (`turn`, `info`, texts); the other steps get no score, which is not a
    failure. If `when` raises, the score has failed. `range`: the range of the return values. `timeout`: time limit of
    one call in seconds. A recipe's entry can override everything except the level and the range.
    A class is instantiated once, as `Class(**args)`, when the recipe is loaded; the instance is then called.
    """
    if level not in ("step", "trajectory"):
        raise RewardError(f"@reward: expected level 'step' or 'trajectory' (for the outcome, @outcome), got {level!r}")
    return Declared(level, agent_match, weight, range, name, timeout, when)


@_decorator
def outcome(
    *, range: tuple[float, float] = (0.0, 1.0), name: str | None = None, timeout: float | None = None
) -> Declared:
    """Declare the global reward: `f(trajectory)` returns a number or a Score. The function itself stays as it is.

    In a team that competes, it may return a dict of these by agent: each agent's steps use its own outcome. An agent
    that is left out has the common outcome: the entry `"*"`, by default the mean of the others.
    """
    return Declared("outcome", range=range, name=name, timeout=timeout)


@_decorator
def answer(
    *,
    range: tuple[float, float] = (0.0, 1.0),
    name: str | None = None,
    timeout: float | None = None,
    read_truth: Callable[[Any], object] | None = None,
) -> Declared:
    """Declare a comparison `f(text, truth)` of an answer with the task's ground truth, for use at two levels.

    As `level: outcome` (the default) it receives `trajectory.answer`, as `level: step` it receives `step.response`.
    `read_truth(truth)` raises ValueError if the function cannot use the truth. `creditflow check` calls it for all
    tasks and lists the rows of such truths, which otherwise fail one by one in training.
    """
    return Declared("answer", range=range, name=name, timeout=timeout, read_truth=read_truth)


def builtin(function: F) -> F:
    """Make a decorated function available to recipes by its bare name."""
    if getattr(function, _MARK, None) is None:
        raise RewardError(f"@builtin: {function.__name__} has no @reward, @outcome or @answer beneath it")
    REWARD_FUNCTIONS.add(getattr(function, _MARK).name or function.__name__, function)
    return function


def declared(function: object) -> Declared | None:
    """The properties that a decorator declares; None without one."""
    return cast(Declared | None, getattr(function, _MARK, None))


def leaves(functions: Iterable[RewardFunction]) -> Iterator[RewardFunction]:
    """The functions that are called: for a sum, its parts."""
    for function in functions:
        yield from function.parts or (function,)
