"""The workflow: a router chooses one of two specialists, who writes a draft; a reviewer reads it and answers."""

from __future__ import annotations

from creditflow import Task, Team


async def solve(task: Task, team: Team) -> str:
    """Answer a task. A step that reads another names it as its parent."""
    choice = await team.router(task.text)
    specialist = team.careful if "y" in choice.lower() else team.quick  # yours: how to read the router's response
    draft = await specialist(task.text, parents=[choice])
    return await team.reviewer(f"{task.text}\nDraft: {draft}", parents=[draft])
