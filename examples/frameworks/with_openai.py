"""The openai client. The only changes to an existing agent: the two arguments of `AsyncOpenAI`."""

from __future__ import annotations

from openai import AsyncOpenAI

from creditflow import Task, Team


async def solve(task: Task, team: Team) -> str:
    """Write one draft and revise it once."""
    async with AsyncOpenAI(base_url=team.base_url, api_key=team.api_key) as client:

        async def ask(agent: str, system: str, text: str) -> str:
            completion = await client.chat.completions.create(
                model=agent, messages=[{"role": "system", "content": system}, {"role": "user", "content": text}]
            )
            return completion.choices[0].message.content or ""

        draft = await ask("writer", "You write one line.", task.text)
        return await ask("editor", "You make a line better.", draft)
