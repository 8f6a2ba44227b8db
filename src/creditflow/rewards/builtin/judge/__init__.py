"""Model-based reward: a judge model reads an agent's response by a rubric, and its verdict is the score.

`arguments` checks a recipe's arguments, `prompt` writes the question, `clients` send it to a model, `verdict` parses
the reply, and `function` makes the score from it. `rollout.endpoint` sends requests.
"""

from creditflow.rewards.builtin.judge.function import Judge, JudgeOutcome

__all__ = ["Judge", "JudgeOutcome"]
