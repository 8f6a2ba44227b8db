"""AutoGen. The only changes: `base_url` and `api_key` of the model clients."""

from __future__ import annotations

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient

from creditflow import Task, Team

INFO = ModelInfo(vision=False, function_calling=True, json_output=False, family="unknown", structured_output=False)
"""AutoGen requires this for models with an unknown name."""


async def solve(task: Task, team: Team) -> str:
    """A group chat of two turns."""

    def agent(name: str, system: str) -> AssistantAgent:
        model = OpenAIChatCompletionClient(model=name, base_url=team.base_url, api_key=team.api_key, model_info=INFO)
        return AssistantAgent(name, model, system_message=system)

    chat = RoundRobinGroupChat(
        [agent("writer", "You write one line."), agent("editor", "You make a line better.")], max_turns=2
    )
    done = await chat.run(task=task.text)
    return str(getattr(done.messages[-1], "content", ""))
