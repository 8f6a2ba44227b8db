"""Plays many tasks at once: one coroutine per trajectory, one scheduler for all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from creditflow.errors import AgentError, ConfigError, PromptTooLong
from creditflow.rollout.scheduler import Scheduler
from creditflow.rollout.team import AgentSpec, Sampling, Team
from creditflow.trajectory import Task, Trajectory

Workflow = Callable[[Task, Team], Awaitable[object]]
"""`async def solve(task, team) -> answer`."""


@dataclass(frozen=True, slots=True)
class Play:
    """One trajectory to be played."""

    task: Task
    uid: str
    """Shared by the plays of one task."""
    id: str
    seed: tuple[int, ...]
    """Key of the trajectory's random numbers."""


async def play_all(
    plays: Sequence[Play],
    workflow: Workflow,
    agents: Mapping[str, AgentSpec],
    scheduler: Scheduler,
    sampling: Sampling,
) -> list[Trajectory]:
    """The trajectories of `plays`, in order, all live at the same time.

    A workflow that raises fails its own trajectory: `status` failed, the error in `info["error"]`. AgentError keeps the
    trajectory (`info["agent_error"]`; the reward room gives it outcome 0). What is no play's fault is raised when all
    have ended: an error of a model, or a ConfigError (a call of an agent that the team does not have). When this
    returns, nothing is generated any more.
    """
    mistakes: list[ConfigError] = []

    async def one(play: Play) -> Trajectory:
        trajectory = Trajectory(id=play.id, uid=play.uid, task=play.task)
        team = Team(agents, trajectory, scheduler, sampling, play.seed)
        try:
            answer = await workflow(play.task, team)
            trajectory.answer = None if answer is None else str(answer)
        except Exception as error:  # whatever a user's workflow may raise is that trajectory's end, and is told
            error = _weightiest(error)
            if isinstance(error, ConfigError):
                mistakes.append(error)
            elif isinstance(error, AgentError):
                trajectory.info["agent_error"] = str(error)
            elif isinstance(error, PromptTooLong):  # the team has marked the trajectory as truncated
                trajectory.info["ended_early"] = str(error)
            else:
                trajectory.status = "failed"
                trajectory.info["error"] = f"{type(error).__name__}: {error}"
        finally:
            await team.close()
        if not trajectory.answer_steps and trajectory.steps:
            trajectory.answer_steps = (len(trajectory.steps) - 1,)
        return trajectory

    trajectories = await asyncio.gather(*(one(play) for play in plays))
    await scheduler.idle()
    for fault in (scheduler.fault, *mistakes):
        if fault is not None:
            raise fault
    return list(trajectories)


def _weightiest(error: Exception) -> Exception:
    """The error to go by where branches of a workflow raised several (`asyncio.TaskGroup`).

    A mistake in the recipe before a fault of the workflow, that before the agents' own, and a long prompt last.
    """
    if not isinstance(error, ExceptionGroup):
        return error
    leaves = [_weightiest(inner) for inner in error.exceptions]
    return min(leaves, key=lambda leaf: 0 if isinstance(leaf, ConfigError) else _WEIGHT.get(type(leaf), 1))


_WEIGHT: dict[type[Exception], int] = {AgentError: 2, PromptTooLong: 3}
