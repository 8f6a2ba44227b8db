"""One agent that solves competition problems, as DAPO trains it: its workflow and the extraction of its answer."""

from __future__ import annotations

import re

from creditflow.data import Task
from creditflow.rollout import Reply, Team

END_CHARACTERS = 300
"""Characters at the end that are searched for the answer, as in DAPO: earlier text is thinking."""


async def solve(task: Task, team: Team) -> str:
    """Make one call with the task's own messages, which ask for a last line `Answer: ...`."""
    reply: Reply = await team.solver(list(task.prompt))
    return answer_in(reply.text)


def answer_in(text: str) -> str:
    """`#### answer` from the text after the last `Answer:`; empty without one."""
    answers = re.findall(r"(?i:answer)[ \t]*:[ \t]*([^\n]+)", text[-END_CHARACTERS:])
    return f"#### {answers[-1].strip()}" if answers else ""
