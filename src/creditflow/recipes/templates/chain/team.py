"""The workflow: a solver writes a draft, a checker reads it and answers."""

from __future__ import annotations

from creditflow import Task, Team


async def solve(task: Task, team: Team) -> str:
    """Answer a task. `parents` records what a step read; rules that pass credit on, such as `threshold`, follow it."""
    draft = await team.solver(task.text)
    return await team.checker(f"{task.text}\nDraft: {draft}", parents=[draft])
