"""The workflow: a solver, who can call tools, writes a draft; a checker reads it and answers."""

from __future__ import annotations

from creditflow import Task, Team


def double(number: int) -> int:
    """Double a number. The signature and this text are the tool's schema.

    Args:
        number: The number to double.
    """
    return 2 * number


async def solve(task: Task, team: Team) -> str:
    """Answer a task. Calls of tools, and their results, are part of the solver's step."""
    draft = await team.solver(task.text)
    return await team.checker(f"{task.text}\nDraft: {draft}", parents=[draft])
