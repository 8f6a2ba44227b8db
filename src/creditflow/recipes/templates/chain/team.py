"""The workflow: a solver writes a draft, a checker reads it and answers."""

from __future__ import annotations

from creditflow import Task, Team


async def solve(task: Task, team: Team) -> str:
    """Answer a task. Credit flows from the checker's step to its parent, the draft."""
    draft = await team.solver(task.text)
    return await team.checker(f"{task.text}\nDraft: {draft}", parents=[draft])
