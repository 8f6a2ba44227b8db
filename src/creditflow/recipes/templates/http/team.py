"""The workflow: agents that call their model over HTTP, with OpenAI's client.

Only `base_url` and `api_key` are creditflow's: any client and any framework works in the same way, Anthropic's too.
"""

from __future__ import annotations

from openai import OpenAI

from creditflow import Task, Team


def solve(task: Task, team: Team) -> str:
    """Answer a task. The model's name selects the agent; each call is recorded as a step."""
    with OpenAI(base_url=team.base_url, api_key=team.api_key) as client:

        def ask(agent: str, text: str) -> str:
            completion = client.chat.completions.create(model=agent, messages=[{"role": "user", "content": text}])
            return completion.choices[0].message.content or ""

        draft = ask("solver", task.text)
        return ask("checker", f"{task.text}\nDraft: {draft}")
