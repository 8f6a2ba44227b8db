"""Sample the final step of a recorded trajectory again, from an endpoint alone.

Without its workflow, a trajectory cannot continue after a changed step. Its final step needs no continuation: the new
response is the new answer, and an outcome function scores it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from creditflow.config import EndpointConfig, PolicyConfig, recipe_of_dict
from creditflow.data import Message, Task, Trajectory
from creditflow.engines.common.components import Components, chat_client, load_functions, reward_manager
from creditflow.engines.local.decisions import Branch, MeasuringRollouts
from creditflow.errors import ConfigError
from creditflow.rollout import AgentSpec, Rollout, Team, run_rollout

_AGENT, _POLICY = "agent", "endpoint"
_HEADING = re.compile(r"(?:\A|\n\n)\[(system|developer|user|assistant|tool|function)\]\n")


async def answer_again(task: Task, team: Team) -> str:
    """Answer a recorded prompt, the messages of the task."""
    return str(await team[_AGENT](list(task.prompt)))


def endpoint_components(endpoint: EndpointConfig, outcome: str, folder: Path) -> Components:
    """The components of `answer_again` with a model behind an endpoint and one outcome function.

    `outcome`: its name or `file.py:function`, relative to `folder`. Raises ConfigError for any other function.
    """
    recipe = recipe_of_dict({"reward": {"functions": [{"fn": outcome}]}, "team": {"agents": {}}}, _POLICY, folder)
    functions = load_functions(recipe)
    if not any(function.level == "outcome" for function in functions):
        raise ConfigError(f"--outcome: expected an outcome function, got {outcome}")
    return Components(
        recipe=recipe,
        train_tasks=(),
        val_tasks=(),
        workflow=answer_again,
        agents={_AGENT: AgentSpec(policy=_POLICY)},
        chat_clients={_POLICY: chat_client("--endpoint", PolicyConfig(), endpoint)},
        rewards=reward_manager(functions, recipe.config),
        stratum=None,
    )


def final_step_problem(trajectory: Trajectory, index: int) -> str:
    """The reason why a step cannot be audited with an endpoint alone; empty if it can."""
    last = len(trajectory.steps) - 1
    if index != last:
        return "a step before the last: later steps depend on it, and only the workflow can make them again (--recipe)"
    if trajectory.answer_steps not in ((), (last,)):
        return "the answer comes from other steps too"
    if messages_of_prompt(trajectory.steps[index].prompt) is None:
        return "its prompt is not recorded as chat messages"
    return ""


def final_step_branch(rollouts: MeasuringRollouts) -> Branch:
    """The function that continues a record from its final step: the recorded answer, or a new one."""
    components = rollouts.components

    async def branch(recorded: Trajectory, at: int, rollout: Rollout) -> Trajectory:
        kept = [replace(s, id=f"{rollout.id}/{s.index}", trajectory_id=rollout.id) for s in recorded.steps[:at]]
        if at == len(recorded.steps):
            answer = recorded.answer if recorded.answer is not None else recorded.steps[-1].response
            await asyncio.sleep(0)
            return Trajectory(rollout.id, rollout.uid, recorded.task, kept, recorded.answer_steps, answer)
        final = recorded.steps[at]
        messages = messages_of_prompt(final.prompt)
        assert messages is not None  # see `final_step_problem`
        sampled = await run_rollout(
            replace(rollout, task=replace(recorded.task, prompt=tuple(messages))),
            components.workflow,
            components.agents,
            rollouts.scheduler,
            replace(components.sampling, temperature=final.temperature),
        )
        new = [
            replace(s, id=f"{rollout.id}/{at}", index=at, agent=final.agent, turn=final.turn, parents=final.parents)
            for s in sampled.steps[:1]
        ]
        return replace(sampled, task=recorded.task, steps=[*kept, *new], answer_steps=(at,) if new else ())

    return branch


def messages_of_prompt(prompt: str) -> Sequence[Message] | None:
    """The chat messages of a prompt written as `[role]` headings and texts; None for another form."""
    headings = list(_HEADING.finditer(prompt))
    if not headings or headings[0].start() != 0:
        return None
    ends = [*(heading.start() for heading in headings[1:]), len(prompt)]
    return [
        {"role": heading[1], "content": prompt[heading.end() : end]}
        for heading, end in zip(headings, ends, strict=True)
    ]
