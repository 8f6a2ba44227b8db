"""Run rollouts: one coroutine per rollout, one generator for all."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from creditflow._utils.awaits import lacks_await
from creditflow._utils.tracebacks import at_users_line, keep_traceback, located, of_function, traceback_text
from creditflow.data import Step, Task, Trajectory
from creditflow.errors import AgentError, ConfigError, PromptTooLong, RolloutTimedOut
from creditflow.rollout.client import Generator
from creditflow.rollout.clock import RolloutClock
from creditflow.rollout.recorder import AgentSpec, Recorder, Sampling
from creditflow.rollout.team import Team
from creditflow.rollout.user_code import end, in_thread, is_callers_end

Workflow = Callable[[Task, Team], object]
"""`async def solve(task, team) -> answer`; or `def`, which runs in a thread and calls its agents over HTTP."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One rollout to run."""

    task: Task
    uid: str
    """Group key, shared by the rollouts of one task."""
    id: str
    seed: tuple[int, ...]
    """Key of the rollout's random numbers."""


async def run_rollout(
    rollout: Rollout,
    workflow: Workflow,
    agents: Mapping[str, AgentSpec],
    generator: Generator,
    sampling: Sampling,
    note: Callable[[Step], None] = lambda _: None,
) -> Trajectory:
    """Run one rollout and return its trajectory, even after an error.

    A workflow that raises fails its trajectory: `status` failed, the error in `info["error"]`. AgentError keeps it
    (`info["agent_error"]`; the rewards give it the worst outcome of its range), and PromptTooLong ends it as
    `truncated`. A rollout that takes longer than `sampling.timeout_s` also fails, or is kept as with AgentError
    (`sampling.timeout_outcome`); `info["timed_out"]` has the limit.

    Raises ConfigError for a mistake in the recipe (a call of an agent that the team does not have), and nothing else
    except cancellation. When this returns or raises, no part of the rollout is running any more, except a thread or a
    task that swallows its cancellation: their later calls raise.

    `note`: called with each step when it is recorded.
    """
    trajectory = Trajectory(id=rollout.id, uid=rollout.uid, task=rollout.task)
    clock = RolloutClock(sampling.timeout_s)
    recorder = Recorder(agents, trajectory, generator, sampling, rollout.seed, clock, note)
    team = Team(recorder)
    running = asyncio.create_task(_run(workflow, team, recorder))
    error: Exception | None = None
    try:
        if await clock.within_limit(running):
            # A workflow that cancelled its own task counts as an error.
            cancelled = running.cancelled()
            trajectory.answer, error = (None, RuntimeError("raised CancelledError")) if cancelled else running.result()
        else:
            error = RolloutTimedOut(clock.limit_s)
    finally:
        await team.close(str(error) if isinstance(error, RolloutTimedOut) else "")
        await end([running])
    if recorder.mistake is not None:  # over HTTP it is the client's error, which a workflow may catch
        raise at_users_line(recorder.mistake, error)
    if error is not None:
        _record_error(error, trajectory, team, sampling)
    if not trajectory.answer_steps and trajectory.steps:
        trajectory.answer_steps = (len(trajectory.steps) - 1,)
    return trajectory


def _record_error(error: Exception, trajectory: Trajectory, team: Team, sampling: Sampling) -> None:
    """Record how an error ended a rollout. Raises a mistake in the recipe."""
    match error:
        case ConfigError():
            raise at_users_line(error)
        case AgentError():
            trajectory.info["agent_error"] = str(error)
        case RolloutTimedOut():
            trajectory.info["timed_out"] = sampling.timeout_s
            if sampling.timeout_outcome == "zero":  # scored as the agents' fault
                trajectory.info["agent_error"] = f"the rollout {error}"
            else:
                trajectory.status = "failed"
                trajectory.info["error"] = f"{type(error).__name__}: the rollout {error}"
        case PromptTooLong():  # the recorder has marked the trajectory as truncated
            trajectory.info["ended_early"] = str(error)
        case _ if team.refused_prompt is not None:  # over HTTP, it arrives as an error of some client library
            trajectory.info["ended_early"] = str(team.refused_prompt)
        case _ if lacks_await(error):
            mistake = f"{type(error).__name__}: {error}: expected its result; add `await` to the call"
            raise at_users_line(ConfigError(mistake), error) from error
        case _:
            trajectory.status = "failed"
            trajectory.info["error"] = located(error, f"{type(error).__name__}: {error}")
            keep_traceback(trajectory.info, "workflow", traceback_text(error))


async def _run(workflow: Workflow, team: Team, recorder: Recorder) -> tuple[str | None, Exception | None]:
    """Return the workflow's answer, or its error. Raises only to end the current task."""
    try:
        with recorder.clock.started():
            answer = await _answer(workflow, recorder.trajectory.task, team)
        recorder.expect_awaited("the workflow's answer", answer, place=of_function(workflow))
        return None if answer is None else str(answer), None
    except BaseException as raised:  # any error of a user's workflow ends only its trajectory
        if is_callers_end(raised):
            raise
        return None, _weightiest(raised)


async def _answer(workflow: Workflow, task: Task, team: Team) -> object:
    if inspect.iscoroutinefunction(workflow):
        return await workflow(task, team)
    team.open()
    answer = await in_thread(lambda: workflow(task, team))
    return await answer if inspect.isawaitable(answer) else answer


async def run_rollouts(
    rollouts: Sequence[Rollout],
    workflow: Workflow,
    agents: Mapping[str, AgentSpec],
    generator: Generator,
    sampling: Sampling,
    finish: Callable[[Trajectory], None] = lambda _: None,
) -> list[Trajectory]:
    """Run all `rollouts` at the same time (see `run_rollout`), and return their trajectories in order.

    `finish`: called with each trajectory when it is finished.

    Errors that are not a rollout's fault are raised when all rollouts have ended: the generator's fault, or the first
    ConfigError. When this returns, no generation is running.
    """
    return await together(
        [run_rollout(rollout, workflow, agents, generator, sampling) for rollout in rollouts], generator, finish
    )


async def together(
    running: Sequence[Awaitable[Trajectory]],
    generator: Generator,
    finish: Callable[[Trajectory], None] = lambda _: None,
) -> list[Trajectory]:
    """Run rollouts on one generator and return their trajectories; see `run_rollouts`."""
    mistakes: list[ConfigError] = []

    async def trajectory_of(rollout: Awaitable[Trajectory]) -> Trajectory | None:
        try:
            trajectory = await rollout
        except ConfigError as mistake:  # the other rollouts end first
            mistakes.append(mistake)
            return None
        finish(trajectory)
        return trajectory

    trajectories = await asyncio.gather(*map(trajectory_of, running))
    await generator.idle()
    for fault in (generator.fault, *mistakes):
        if fault is not None:
            raise fault
    return [trajectory for trajectory in trajectories if trajectory is not None]


def _weightiest(error: BaseException) -> Exception:
    """Return the error to report if branches of a workflow raised several (`asyncio.TaskGroup`).

    The order is: a mistake in the recipe, an error of the workflow, an agents' error, a long prompt. A BaseException
    becomes an Exception, as from a thread.
    """
    if not isinstance(error, BaseExceptionGroup):
        if isinstance(error, Exception):
            return error
        return RuntimeError(f"raised {type(error).__name__}").with_traceback(error.__traceback__)
    leaves = [_weightiest(inner) for inner in error.exceptions]
    return min(leaves, key=lambda leaf: 0 if isinstance(leaf, ConfigError) else _WEIGHT.get(type(leaf), 1))


_WEIGHT: dict[type[Exception], int] = {AgentError: 2, PromptTooLong: 3}
