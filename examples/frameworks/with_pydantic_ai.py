"""pydantic-ai. The only changes: `base_url` and `api_key` of the models' provider."""

from __future__ import annotations

from pydantic_ai import Agent, UnexpectedModelBehavior
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from creditflow import AgentError, Task, Team


async def solve(task: Task, team: Team) -> str:
    """Two agents, one after the other."""
    async with OpenAIProvider(base_url=team.base_url, api_key=team.api_key) as provider:

        def agent(name: str, instructions: str) -> Agent:
            return Agent(OpenAIChatModel(name, provider=provider), instructions=instructions)

        try:
            draft = await agent("writer", "You write one line.").run(task.text)
            final = await agent("editor", "You make a line better.").run(draft.output)
        except UnexpectedModelBehavior as error:  # an empty response, and another after a retry
            raise AgentError(str(error)) from error
        return str(final.output)
