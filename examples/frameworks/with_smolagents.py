"""smolagents. The only changes: `api_base` and `api_key` of the models, and `tool_choice`: a call cannot be forced."""

from __future__ import annotations

from smolagents import LogLevel, OpenAIModel, ToolCallingAgent

from creditflow import Task, Team


def solve(task: Task, team: Team) -> str:
    """Two agents, one after the other. A plain function, since smolagents blocks."""

    def agent(name: str, instructions: str) -> ToolCallingAgent:
        model = OpenAIModel(name, api_base=team.base_url, api_key=team.api_key, tool_choice="auto")
        return ToolCallingAgent([], model, instructions=instructions, max_steps=1, verbosity_level=LogLevel.OFF)

    draft = agent("writer", "You write one line.").run(task.text)
    return str(agent("editor", "You make a line better.").run(str(draft)))
