"""The anthropic client. The only changes to an existing agent: the two arguments of `AsyncAnthropic`."""

from __future__ import annotations

from anthropic import AsyncAnthropic

from creditflow import Task, Team


async def solve(task: Task, team: Team) -> str:
    """Write one draft and revise it once."""
    async with AsyncAnthropic(base_url=team.base_url, api_key=team.api_key) as client:

        async def ask(agent: str, system: str, text: str) -> str:
            message = await client.messages.create(
                model=agent, system=system, messages=[{"role": "user", "content": text}], max_tokens=24
            )
            return "".join(block.text for block in message.content if block.type == "text")

        draft = await ask("writer", "You write one line.", task.text)
        return await ask("editor", "You make a line better.", draft)
