"""The OpenAI Agents SDK. The only change: the models' client. The SDK's tracing is off: it would upload every run."""

from __future__ import annotations

from agents import Agent, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI

from creditflow import Task, Team

set_tracing_disabled(True)


async def solve(task: Task, team: Team) -> str:
    """Two agents, one after the other."""
    async with AsyncOpenAI(base_url=team.base_url, api_key=team.api_key) as client:

        def agent(name: str, instructions: str) -> Agent:
            return Agent(name, instructions=instructions, model=OpenAIChatCompletionsModel(name, openai_client=client))

        draft = await Runner.run(agent("writer", "You write one line."), task.text)
        final = await Runner.run(agent("editor", "You make a line better."), draft.final_output)
        return str(final.final_output)
