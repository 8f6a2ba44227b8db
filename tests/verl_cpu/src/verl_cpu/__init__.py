"""verl on a CPU, and a rollout server that samples with transformers. For tests; importing it imports nothing heavy."""

from verl_cpu.settings import environment, options

__all__ = ["environment", "options"]
