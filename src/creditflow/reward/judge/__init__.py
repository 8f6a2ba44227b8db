"""Model-based reward: a judge model reads what an agent wrote, by a rubric, and its verdict is the score.

`arguments` checks what a recipe says, `prompt` writes the question, `clients` put it to a model (`bounded` limits what
an endpoint may answer), `verdict` reads the reply, `function` makes the score of it.
"""

from creditflow.reward.judge.function import Judge, JudgeOutcome

__all__ = ["Judge", "JudgeOutcome"]
