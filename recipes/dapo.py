"""One agent that solves competition problems, as DAPO trains it: how it plays, and where its answer stands."""

from __future__ import annotations

import re

from creditflow.rollout import Reply, Team
from creditflow.trajectory import Task

END_CHARACTERS = 300
"""The answer is looked for in so much of the end, as DAPO does: what comes before is thinking."""


async def solve(task: Task, team: Team) -> str:
    """One call: the task's own messages, which ask for a last line `Answer: ...`."""
    reply: Reply = await team.solver(list(task.prompt))
    return answer_in(reply.text)


def answer_in(text: str) -> str:
    """`#### answer` of what follows the last `Answer:`; empty where there is none."""
    found = re.findall(r"(?i:answer)[ \t]*:[ \t]*([^\n]+)", text[-END_CHARACTERS:])
    return f"#### {found[-1].strip()}" if found else ""
