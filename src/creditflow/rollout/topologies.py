"""Ready-made topologies: short functions that make workflows.

    # my_team.py
    from creditflow.rollout import topologies
    solve = topologies.debate("ann", "bob", rounds=2, judge="judge")

    # the recipe: team: {workflow: my_team.py:solve, agents: {ann: {}, bob: {}, judge: {}}}

A step's parents are the replies that its agent reads. A `Prompt` function makes an agent's prompt; the default gives
the task, and each reply under its agent's name. This module uses no models, rewards or training.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated, ParamSpec, TypeVar

from pydantic import ConfigDict, Field, ValidationError, validate_call

from creditflow.data import Message, Task
from creditflow.errors import ConfigError
from creditflow.rollout import Reply, Team, Workflow

Prompt = Callable[[Task, str, Sequence[Reply]], str | Sequence[Message]]
"""Makes an agent's prompt, a text or chat messages, from the task, the agent's name and the replies that it reads.
These replies are the step's parents."""


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Name = Annotated[str, Field(min_length=1)]
Positive = Annotated[int, Field(ge=1)]


def _checked(make: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Check arguments by their type hints when a workflow is made. Raises ConfigError."""
    validated = validate_call(config=ConfigDict(strict=True))(make)

    @functools.wraps(make)
    def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return validated(*args, **kwargs)
        except ValidationError as error:
            problem = error.errors()[0]
            place = ".".join(map(str, (make.__name__, *problem["loc"])))
            raise ConfigError(f"{place}: {problem['msg']}, got {problem['input']!r:.80}") from error

    return checked


def plain(task: Task, agent: str, read: Sequence[Reply]) -> str:
    """Return the task and, below it, each reply under its agent's name."""
    return "\n\n".join([task.text, *(f"{reply.step.agent}:\n{reply.text}" for reply in read)])


@_checked
def chain(first: Name, *others: Name, prompt: Prompt = plain) -> Workflow:
    """Make a workflow in which each agent reads the reply of the one before it; the last one answers."""

    async def solve(task: Task, team: Team) -> str:
        reply = await _ask(team, first, task, [], prompt)
        for agent in others:
            reply = await _ask(team, agent, task, [reply], prompt)
        return reply.text

    return solve


@_checked
def debate(
    first: Name,
    *others: Name,
    rounds: Annotated[int, Field(ge=0)] = 2,
    judge: Name | None = None,
    prompt: Prompt = plain,
    key: Callable[[str], str] = str.strip,
) -> Workflow:
    """Make a workflow in which all agents answer alone, then read all replies for `rounds` rounds.

    A judge reads the last round and answers, as in a mixture of agents (arXiv 2406.04692). Without a judge the answer
    is the majority's last reply, compared by `key` (in a tie the first agent's), and it comes from the steps of that
    majority.
    """

    async def solve(task: Task, team: Team) -> str:
        replies = await _each(team, (first, *others), task, [], prompt)
        for _ in range(rounds):
            replies = await _each(team, (first, *others), task, replies, prompt)
        if judge is not None:
            return (await _ask(team, judge, task, replies, prompt)).text
        votes = Counter(key(reply.text) for reply in replies)
        answer = next(reply for reply in replies if votes[key(reply.text)] == max(votes.values()))
        team.answer_from(*(reply for reply in replies if key(reply.text) == key(answer.text)))
        return answer.text

    return solve


def numbered_lines(plan: str) -> list[str]:
    """Return the lines of a plan that begin with a number or a dash, without it; all lines if none does."""
    items = re.findall(r"(?m)^\s*(?:\d+[.):]|[-*])\s+(\S.*)$", plan)
    return items or [line.strip() for line in plan.splitlines() if line.strip()]


def says_yes(verdict: str) -> bool:
    """Whether a verdict's first word is yes, right, correct, ok or true."""
    first = re.match(r"\W*(\w+)", verdict.casefold())
    return first is not None and first[1] in ("yes", "right", "correct", "ok", "true")


@_checked
def planner_executor_verifier(
    planner: Name = "planner",
    executor: Name = "executor",
    verifier: Name | None = "verifier",
    *,
    parts: Callable[[str], Sequence[str]] = numbered_lines,
    accepted: Callable[[str], bool] = says_yes,
    most_parts: Positive = 8,
    tries: Positive = 2,
) -> Workflow:
    """Make a workflow that plans, executes the `parts` of the plan in order, and verifies each result.

    If the verifier rejects a result, the executor tries again with the verdict in its prompt. The last result is the
    answer. At most `most_parts` parts, and `tries` tries for each. The executor reads the plan, the newest result, and
    the verdict on its last try; the verifier reads the result that it judges.
    """

    async def solve(task: Task, team: Team) -> str:
        plan = await team[planner](f"{task.text}\n\nWrite a numbered plan.")
        newest: Reply | None = None
        for part in list(parts(plan.text))[:most_parts] or [task.text]:
            verdict: Reply | None = None
            result = newest
            for _ in range(tries):
                read = [plan, *(reply for reply in (result, verdict) if reply is not None)]
                result = await team[executor](f"{plain(task, executor, read)}\n\nNow: {part}", parents=read)
                if verifier is None:
                    break
                question = (
                    f"{task.text}\n\nAsked: {part}\n\nWritten:\n{result.text}\n\nIs it right? Begin with yes or no."
                )
                verdict = await team[verifier](question, parents=[result])
                if accepted(verdict.text):
                    break
            newest = result
        assert newest is not None
        team.answer_from(newest)
        return newest.text

    return solve


def _goal(task: Task) -> str:
    return str(task.extra_info.get("goal", f"You are a user. Ask for this, and answer what you are asked: {task.text}"))


@_checked
def dialogue(
    agent: Name,
    user: Name,
    *,
    turns: Positive = 10,
    goal: Callable[[Task], str] = _goal,
    until: str | None = None,
) -> Workflow:
    """Make a workflow in which `user` begins, `agent` answers, and so on, for at most `turns` turns.

    The answer is the last reply of `agent`. Each agent reads the conversation from its side, as chat messages: its own
    replies as the assistant's, the other agent's as the user's. The prompt of the simulated user begins with the `goal`
    of the task (default: `extra_info["goal"]`, else an instruction to ask for the task); `agent` reads only the user's
    replies. A reply of the user that contains `until` ends the conversation. The user's policy is usually a different
    one, which is not trained.
    """

    async def solve(task: Task, team: Team) -> str:
        replies: list[Reply] = []
        brief: list[Message] = [{"role": "user", "content": goal(task)}]
        for _ in range(turns):
            request = await team[user]([*brief, *_seen_by(user, replies)], parents=replies)
            if until is not None and replies and until in request:
                break
            replies.append(request)
            replies.append(await team[agent](_seen_by(agent, replies), parents=replies))
        team.answer_from(replies[-1])
        return replies[-1].text

    return solve


def _seen_by(agent: str, replies: Sequence[Reply]) -> list[Message]:
    """Return a conversation from one agent's side."""
    return [{"role": "assistant" if reply.step.agent == agent else "user", "content": reply.text} for reply in replies]


async def _ask(team: Team, agent: str, task: Task, read: Sequence[Reply], prompt: Prompt) -> Reply:
    text = prompt(task, agent, read)
    if not isinstance(text, str | list | tuple):
        raise ConfigError(f"prompt: expected a function that returns a text or messages, got {text!r:.80} from it")
    return await team[agent](text, parents=read)


async def _each(team: Team, agents: Sequence[str], task: Task, read: Sequence[Reply], prompt: Prompt) -> list[Reply]:
    return list(await asyncio.gather(*(_ask(team, agent, task, read, prompt) for agent in agents)))
