"""verl on a CPU, and a rollout server that samples with transformers, for tests. The import is light."""

from verl_cpu.settings import environment, mode_options, options

__all__ = ["environment", "mode_options", "options"]
