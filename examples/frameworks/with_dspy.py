"""DSPy. The only changes: `api_base` and `api_key` of the language model.

All predictors share one model. The recipe finds the agent of a call by the signature's instructions (`match`).
"""

from __future__ import annotations

import dspy
from dspy.utils.exceptions import AdapterParseError

from creditflow import AgentError, Task, Team


async def solve(task: Task, team: Team) -> str:
    """A program of two predictors."""
    # With a cache, every rollout of a task would get the first one's responses.
    model = dspy.LM("openai/gpt-4o-mini", api_base=team.base_url, api_key=team.api_key, cache=False)
    write = dspy.Predict(dspy.Signature("subject -> line", "You write one line."))
    edit = dspy.Predict(dspy.Signature("draft -> line", "You make a line better."))
    with dspy.context(lm=model, adapter=dspy.ChatAdapter(use_json_adapter_fallback=False)):
        try:
            draft = await write.acall(subject=task.text)
            return str((await edit.acall(draft=draft.line)).line)
        except AdapterParseError as error:
            raise AgentError(str(error)) from error
