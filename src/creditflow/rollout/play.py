"""Plays tasks: one coroutine per trajectory, one generator for all."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from creditflow.errors import AgentError, ConfigError, PromptTooLong
from creditflow.rollout.client import Generator
from creditflow.rollout.recorder import AgentSpec, Recorder, Sampling
from creditflow.rollout.team import Team
from creditflow.rollout.threads import in_thread, is_callers_end
from creditflow.trajectory import Task, Trajectory

Workflow = Callable[[Task, Team], object]
"""`async def solve(task, team) -> answer`; or `def`, which runs in a thread and calls its agents over HTTP."""


@dataclass(frozen=True, slots=True)
class Play:
    """One trajectory to be played."""

    task: Task
    uid: str
    """Shared by the plays of one task."""
    id: str
    seed: tuple[int, ...]
    """Key of the trajectory's random numbers."""


async def play_one(
    play: Play, workflow: Workflow, agents: Mapping[str, AgentSpec], generator: Generator, sampling: Sampling
) -> Trajectory:
    """One trajectory, whatever became of it.

    A workflow that raises fails its trajectory: `status` failed, the error in `info["error"]`. AgentError keeps it
    (`info["agent_error"]`; the reward room gives it outcome 0), PromptTooLong ends it as `truncated`. Raises
    ConfigError for a mistake in the recipe (a call of an agent that the team does not have), and nothing else but
    cancellation. When this returns or raises, nothing of the play is under way any more.
    """
    trajectory = Trajectory(id=play.id, uid=play.uid, task=play.task)
    team = Team(Recorder(agents, trajectory, generator, sampling, play.seed))
    error: Exception | None = None
    try:
        answer = await _answer(workflow, play.task, team)
        trajectory.answer = None if answer is None else str(answer)
    except BaseException as raised:  # whatever a user's workflow may raise is that trajectory's end, and is told
        if is_callers_end(raised):
            raise
        error = _weightiest(raised)
    finally:
        await team.close()
    match error:
        case None:
            pass
        case ConfigError():
            raise error
        case AgentError():
            trajectory.info["agent_error"] = str(error)
        case PromptTooLong():  # the team has marked the trajectory as truncated
            trajectory.info["ended_early"] = str(error)
        case _ if team.refused_prompt is not None:  # over HTTP, it comes as an error of whatever client was told so
            trajectory.info["ended_early"] = str(team.refused_prompt)
        case _:
            trajectory.status = "failed"
            trajectory.info["error"] = f"{type(error).__name__}: {error}"
    if not trajectory.answer_steps and trajectory.steps:
        trajectory.answer_steps = (len(trajectory.steps) - 1,)
    return trajectory


async def _answer(workflow: Workflow, task: Task, team: Team) -> object:
    if inspect.iscoroutinefunction(workflow):
        return await workflow(task, team)
    team.open()
    answer = await in_thread(lambda: workflow(task, team))
    return await answer if inspect.isawaitable(answer) else answer


async def play_all(
    plays: Sequence[Play],
    workflow: Workflow,
    agents: Mapping[str, AgentSpec],
    generator: Generator,
    sampling: Sampling,
) -> list[Trajectory]:
    """The trajectories of `plays` (see `play_one`), in order, all live at the same time.

    What is no play's fault is raised when all have ended: the generator's fault, or the first ConfigError. When this
    returns, nothing is generated any more.
    """
    return await together([play_one(play, workflow, agents, generator, sampling) for play in plays], generator)


async def together(playing: Sequence[Awaitable[Trajectory]], generator: Generator) -> list[Trajectory]:
    """What plays on one generator come to; see `play_all`."""
    mistakes: list[ConfigError] = []

    async def one(play: Awaitable[Trajectory]) -> Trajectory | None:
        try:
            return await play
        except ConfigError as mistake:  # the other plays end first
            mistakes.append(mistake)
            return None

    played = await asyncio.gather(*map(one, playing))
    await generator.idle()
    for fault in (generator.fault, *mistakes):
        if fault is not None:
            raise fault
    return [trajectory for trajectory in played if trajectory is not None]


def _weightiest(error: BaseException) -> Exception:
    """The error to go by where branches of a workflow raised several (`asyncio.TaskGroup`).

    A mistake in the recipe before a fault of the workflow, that before the agents' own, and a long prompt last. What is
    no Exception comes as one, as from a thread.
    """
    if not isinstance(error, BaseExceptionGroup):
        return error if isinstance(error, Exception) else RuntimeError(f"raised {type(error).__name__}")
    leaves = [_weightiest(inner) for inner in error.exceptions]
    return min(leaves, key=lambda leaf: 0 if isinstance(leaf, ConfigError) else _WEIGHT.get(type(leaf), 1))


_WEIGHT: dict[type[Exception], int] = {AgentError: 2, PromptTooLong: 3}
