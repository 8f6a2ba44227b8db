"""Agno. The only changes: `base_url` and `api_key` of the models. Its telemetry is off: it would report every run."""

from __future__ import annotations

from agno.agent import Agent
from agno.models.openai.like import OpenAILike
from agno.run.base import RunStatus

from creditflow import Task, Team


async def solve(task: Task, team: Team) -> str:
    """Two agents, one after the other."""

    async def ask(name: str, instructions: str, text: str) -> str:
        model = OpenAILike(id=name, base_url=team.base_url, api_key=team.api_key)
        done = await Agent(name=name, model=model, instructions=instructions, telemetry=False).arun(text)
        # Agno returns the text of an error as the content of the run.
        if done.status is not RunStatus.completed:
            raise RuntimeError(f"{name}: {done.content}")
        return str(done.content)

    draft = await ask("writer", "You write one line.", task.text)
    return await ask("editor", "You make a line better.", draft)
