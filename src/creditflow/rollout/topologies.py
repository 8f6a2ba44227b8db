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
import inspect
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from creditflow.data import Message, Task
from creditflow.errors import ConfigError
from creditflow.rollout import Reply, Team, Workflow

Prompt = Callable[[Task, str, Sequence[Reply]], str | Sequence[Message]]
"""Makes an agent's prompt, a text or chat messages, from the task, the agent's name and the replies that it reads.
These replies are the step's parents."""


def plain(task: Task, agent: str, read: Sequence[Reply]) -> str:
    """Return the task and, below it, each reply under its agent's name."""
    return "\n\n".join([task.text, *(f"{reply.step.agent}:\n{reply.text}" for reply in read)])


def chain(*agents: str, prompt: Prompt = plain) -> Workflow:
    """Make a workflow in which each agent reads the reply of the one before it; the last one answers."""
    _expect("chain", agents=(agents, _NAMES), prompt=(prompt, _PROMPT))

    async def solve(task: Task, team: Team) -> str:
        replies: list[Reply] = []
        for agent in agents:
            replies = [await _ask(team, agent, task, replies, prompt)]
        return replies[0].text

    return solve


def debate(
    *agents: str,
    rounds: int = 2,
    judge: str | None = None,
    prompt: Prompt = plain,
    key: Callable[[str], str] = str.strip,
) -> Workflow:
    """Make a workflow in which all agents answer alone, then read all replies for `rounds` rounds.

    A judge reads the last round and answers. Without a judge the answer is the majority's last reply, compared by `key`
    (in a tie the first agent's), and it comes from the steps of that majority.
    """
    _expect("debate", agents=(agents, _NAMES), rounds=(rounds, _at_least(0)), judge=(judge, _NAME_OR_NONE))
    _expect("debate", prompt=(prompt, _PROMPT), key=(key, _function("text")))

    async def solve(task: Task, team: Team) -> str:
        replies = await _each(team, agents, task, [], prompt)
        for _ in range(rounds):
            replies = await _each(team, agents, task, replies, prompt)
        if judge is not None:
            return (await _ask(team, judge, task, replies, prompt)).text
        votes = Counter(key(reply.text) for reply in replies)
        answer = next(reply for reply in replies if votes[key(reply.text)] == max(votes.values()))
        team.answer_from(*(reply for reply in replies if key(reply.text) == key(answer.text)))
        return answer.text

    return solve


def mixture(*proposers: str, judge: str, layers: int = 1, prompt: Prompt = plain) -> Workflow:
    """Make a workflow in which each layer of proposers reads the layer before; a judge reads the last one and answers.

    A mixture of agents (arXiv 2406.04692). The first layer reads the task alone.
    """
    _expect("mixture", proposers=(proposers, _NAMES), judge=(judge, _NAME), layers=(layers, _at_least(1)))
    _expect("mixture", prompt=(prompt, _PROMPT))
    return debate(*proposers, rounds=layers - 1, judge=judge, prompt=prompt)


@dataclass(frozen=True)
class Manager:
    """An agent of a tree, and its workers."""

    agent: str
    workers: tuple[str | Manager, ...]


def boss(agent: str, *workers: str | Manager) -> Manager:
    """Return an agent of a tree with its workers; a worker may be a boss, too."""
    _expect("boss", agent=(agent, _NAME), workers=(workers, _WORKERS))
    return Manager(agent, workers)


def tree(root: Manager, prompt: Prompt = plain) -> Workflow:
    """Make a workflow in which leaves work on the task alone, each boss reads its workers, and the root answers."""
    _expect("tree", root=(root, ("a boss(...) or an agent's name", _works)), prompt=(prompt, _PROMPT))

    async def work(task: Task, team: Team, node: str | Manager) -> Reply:
        if isinstance(node, str):
            return await _ask(team, node, task, [], prompt)
        read = await asyncio.gather(*(work(task, team, worker) for worker in node.workers))
        return await _ask(team, node.agent, task, read, prompt)

    async def solve(task: Task, team: Team) -> str:
        return (await work(task, team, root)).text

    return solve


def numbered_lines(plan: str) -> list[str]:
    """Return the lines of a plan that begin with a number or a dash, without it; all lines if none does."""
    items = re.findall(r"(?m)^\s*(?:\d+[.):]|[-*])\s+(\S.*)$", plan)
    return items or [line.strip() for line in plan.splitlines() if line.strip()]


def says_yes(verdict: str) -> bool:
    """Whether a verdict's first word is yes, right, correct, ok or true."""
    first = re.match(r"\W*(\w+)", verdict.casefold())
    return first is not None and first[1] in ("yes", "right", "correct", "ok", "true")


def planner_executor_verifier(
    planner: str = "planner",
    executor: str = "executor",
    verifier: str | None = "verifier",
    *,
    parts: Callable[[str], Sequence[str]] = numbered_lines,
    accepted: Callable[[str], bool] = says_yes,
    most_parts: int = 8,
    tries: int = 2,
) -> Workflow:
    """Make a workflow that plans, executes the `parts` of the plan in order, and verifies each result.

    If the verifier rejects a result, the executor tries again with the verdict in its prompt. The last result is the
    answer. At most `most_parts` parts, and `tries` tries for each. The executor reads the plan, the newest result, and
    the verdict on its last try; the verifier reads the result that it judges.
    """
    called = "planner_executor_verifier"
    _expect(called, planner=(planner, _NAME), executor=(executor, _NAME), verifier=(verifier, _NAME_OR_NONE))
    _expect(called, parts=(parts, _function("plan")), accepted=(accepted, _function("verdict")))
    _expect(called, most_parts=(most_parts, _at_least(1)), tries=(tries, _at_least(1)))

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


def dialogue(
    agent: str,
    user: str,
    *,
    turns: int = 10,
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
    _expect("dialogue", agent=(agent, _NAME), user=(user, _NAME), turns=(turns, _at_least(1)))
    _expect("dialogue", goal=(goal, _function("task")), until=(until, _TEXT_OR_NONE))

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
        raise ConfigError(f"prompt: expected {_PROMPT[0]}, which gives a text or messages, got {text!r:.80} from it")
    return await team[agent](text, parents=read)


async def _each(team: Team, agents: Sequence[str], task: Task, read: Sequence[Reply], prompt: Prompt) -> list[Reply]:
    return list(await asyncio.gather(*(_ask(team, agent, task, read, prompt) for agent in agents)))


_Kind = tuple[str, Callable[[Any], bool]]
"""Description of an argument, and a test for it."""


def _expect(called: str, **arguments: tuple[object, _Kind]) -> None:
    """Raise ConfigError for invalid arguments when the workflow is made."""
    for name, (value, (expected, fits)) in arguments.items():
        if not fits(value):
            raise ConfigError(f"{called}: {name}: expected {expected}, got {value!r:.80}")


def _named(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _works(value: object) -> bool:
    return isinstance(value, Manager) or _named(value)


def _at_least(least: int) -> _Kind:
    return f"a whole number, {least} or more", lambda value: type(value) is int and value >= least


def _function(*takes: str) -> _Kind:
    """A plain function that takes these arguments."""

    def fits(value: Any) -> bool:
        if not callable(value) or inspect.iscoroutinefunction(value):
            return False
        try:
            inspect.signature(value).bind(*takes)
        except TypeError:
            return False
        except ValueError:  # a built-in function may have no signature
            return True
        return True

    return f"a plain function of ({', '.join(takes)})", fits


_NAME: _Kind = ("an agent's name", _named)
_NAME_OR_NONE: _Kind = ("an agent's name or None", lambda value: value is None or _named(value))
_TEXT_OR_NONE: _Kind = ("a text or None", _NAME_OR_NONE[1])
_NAMES: _Kind = (
    'at least one agent, their names as arguments of their own, ("a", "b")',
    lambda values: len(values) > 0 and all(map(_named, values)),
)
_WORKERS: _Kind = (
    "at least one worker, each an agent's name or a boss(...)",
    lambda values: len(values) > 0 and all(map(_works, values)),
)
_PROMPT = _function("task", "agent", "replies")
